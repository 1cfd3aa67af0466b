"""Horovod as its documentation shows it (0.28, "Horovod with PyTorch"), without ddlbench's frameworks: what ours must
equal."""

from __future__ import annotations

import horovod.torch as hvd  # pyright: ignore[reportMissingImports]
import torch

from tests.support.reference import Case, cross_entropy, order


def train(case: Case) -> dict[str, torch.Tensor]:
    """The weights, on a rank of a Horovod that has been started."""
    torch.manual_seed(case.seed + hvd.rank())  # rank 0's weights are broadcast
    model = case.model.build()
    replica = case.global_batch // hvd.size()
    micro = case.micro_batch or replica
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.9, weight_decay=1e-4),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=replica // micro,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    data = case.data.split(True, case.model, case.seed)
    for chosen in order(case).split(case.global_batch)[: case.steps]:
        optimizer.zero_grad()
        for rows in chosen.split(replica)[hvd.rank()].split(micro):
            loss = cross_entropy(model(data.inputs[rows]), data.targets[rows])
            (loss * micro / replica).backward()
        optimizer.step()
    return model.state_dict()
