"""Training with old weights as one plain process would simulate it: what PipeDream must equal.

Update t changes the newest weights by the gradient that minibatch t has at older ones: stage s sees them as they were
staleness[s] updates ago, though not as they were before the pipeline was last empty. Nothing of the package's loop or
frameworks is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from tests.support.reference import Case, Outcome, autocast, buffers, cross_entropy, order, restore, validate


def simulate(
    case: Case, blocks: Sequence[int], staleness: Sequence[int], data_size: int = 1, emptied: int = 0
) -> Outcome:
    """blocks: how many each stage has; staleness: of each stage, in updates; emptied: the pipeline is empty before this
    update, as before the first."""
    torch.manual_seed(case.seed)
    model = case.model.build().train()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.9, weight_decay=1e-4)
    train = case.data.split(True, case.model, case.seed)
    ages = dict(
        zip(model._modules, [age for age, n in zip(staleness, blocks, strict=True) for _ in range(n)], strict=True)
    )
    history = [snapshot(model)]
    statistics = [buffers(model) for _ in range(data_size)]
    losses: list[float] = []
    replica = case.global_batch // data_size
    for update, chosen in enumerate(order(case).split(case.global_batch)[: case.steps]):
        total = 0.0
        first = emptied if update >= emptied else 0
        weights = {
            name: history[max(first, update - ages[name.split(".")[0]])][name].clone().requires_grad_()
            for name in history[0]
        }
        for rank, share in enumerate(chosen.split(replica)):
            restore(model, statistics[rank])
            for rows in share.split(case.micro_batch or replica):
                with autocast(case):
                    output = functional_call(model, weights, train.inputs[rows])
                loss = cross_entropy(output, train.targets[rows]) * len(rows) / case.global_batch
                loss.backward()
                total += loss.item()
            statistics[rank] = buffers(model)
        for name, parameter in model.named_parameters():
            parameter.grad = weights[name].grad
        for group in optimizer.param_groups:
            group["lr"] = case.rate(update)
        optimizer.step()
        history.append(snapshot(model))
        losses.append(total)
    restore(model, {name: torch.stack([each[name] for each in statistics]).mean(0) for name in statistics[0]})
    return Outcome(
        losses, {k: v.clone() for k, v in model.state_dict().items()}, validate(case, model), case.steps, start
    )


def snapshot(model: torch.nn.Module) -> Mapping[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
