"""Tensor parallelism: tp ranks share every layer of a model, dp such groups are replicas.

Transformers and classifiers as in Megatron-LM (Shoeybi et al. 2019), convolutions by filters (Kahira et al. 2021). What
is split how stands beside each model; the parts are made in frameworks/tensor/layers.py (docs/adr/0008).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.ddp import NO_BUFFER_SYNC
from ddlbench.frameworks.shared.batchnorm import Statistics, average
from ddlbench.frameworks.shared.common import (
    Update,
    accumulate,
    check_alike,
    checkpoint_blocks,
    clip_parts,
    drop,
    evaluate,
    gradient,
    subgroup,
    whole_state,
)
from ddlbench.frameworks.shared.layout import fill
from ddlbench.frameworks.tensor.checks import check_compile, check_parts, check_sequence
from ddlbench.frameworks.tensor.collectives import Part, share
from ddlbench.frameworks.tensor.layers import joined_state, own_state, split_model
from ddlbench.frameworks.tensor.loss import loss_of_parts, whole_logits
from ddlbench.job import Batch, Job, Place


@dataclass
class TensorParallel:
    """One mesh of dp x tp ranks, neighbours sharing a replica; conf/framework/tensor.yaml says what each knob means."""

    name: str = "tensor"
    dp: int = 1
    tp: int | None = None
    sequence_parallel: bool = False
    parallel_loss: bool = True

    def __post_init__(self) -> None:
        if min(self.dp, self.tp or 1) < 1:
            raise UserError(f"framework.dp={self.dp} and framework.tp={self.tp} must be 1 or more")

    def check(self, job: Job) -> None:
        tp = fill(job.world_size, {"dp": self.dp, "tp": self.tp}, free="tp")
        if tp > 1:
            check_parts(self.name, job, tp)
        check_compile(self.name, job)
        if self.sequence_parallel:
            check_sequence(job, tp)
        if job.reduce_dtype == "bf16" and job.device.type != "cuda":
            raise Unsupported("tensor: gradients in bf16 need NCCL (gloo cannot sum them): use fp16 or fp32 on CPU")
        check_alike(job, self.dp)

    def setup(self, job: Job) -> Place:
        self.count = job.micro_batches(self.dp)
        self._connect(job)
        self.job = replace(job, loss=loss_of_parts(job, self.part, self.parallel_loss))
        self._build()
        self.statistics = Statistics(self.model, self.replicas)
        reads, coordinates = self.part.rank == 0, {"dp": self.data_rank, "tp": self.part.rank}
        return Place(self.data_rank, self.dp, reads_data=reads, reports=reads, coordinates=coordinates)

    def _connect(self, job: Job) -> None:
        """Ranks d * tp to (d + 1) * tp - 1 make replica d: what is sent most goes between neighbours."""
        tp = fill(job.world_size, {"dp": self.dp, "tp": self.tp}, free="tp")
        self.data_rank, tp_rank = divmod(job.rank, tp)
        layout = torch.arange(job.world_size).view(self.dp, tp)
        group = subgroup(layout.tolist(), job) if tp > 1 else None
        self.replicas = subgroup(layout.T.tolist(), job) if self.dp > 1 else None
        self.part = Part(group, tp_rank, tp, sequence=self.sequence_parallel and tp > 1)

    def _build(self) -> None:
        """Built whole on the CPU, for the same weights everywhere; only this rank's part goes to the device."""
        job = self.job
        self.model = replace(job, device=torch.device("cpu")).build()
        self.splits = split_model(self.model, job.model.tensor_plan(), self.part)
        self.model.to(job.device)
        if job.checkpoint_activations:
            checkpoint_blocks(self.model)
        self.trained = self._replicated(self.model) if self.dp > 1 else self.model
        self.optimizer = job.optimizer(self.model.named_parameters())
        self.update = Update(self.optimizer, job, self.part.group)

    def _replicated(self, model: nn.Module) -> DistributedDataParallel:
        """Each part averages its gradients over its copies in the other replicas."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped = DistributedDataParallel(
            model, process_group=self.replicas, **NO_BUFFER_SYNC, init_sync=False, gradient_as_bucket_view=True
        )
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        if self.job.reduce_dtype in hooks:
            wrapped.register_comm_hook(self.replicas, hooks[self.job.reduce_dtype])
        return wrapped

    @property
    def updates(self) -> int:
        return self.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        # Whatever a rank drew in between, the loader's first rank for one: a replica's ranks draw the same in a step.
        torch.manual_seed(torch.initial_seed() + self.dp)
        shared = self._shared(batch)
        no_sync = self.trained.no_sync if isinstance(self.trained, DistributedDataParallel) else nullcontext
        loss = accumulate(self.trained, shared, self.job, self.count, self.update, no_sync)
        self._sum_over_tokens()
        self.update.apply(self.model.parameters(), self._clip)
        self.statistics.moved()
        return loss if batch is not None else None

    def _shared(self, batch: Batch | None) -> Batch:
        return share(batch, self.job, self.job.replica_batch(self.dp), self.part)

    def _sum_over_tokens(self) -> None:
        """With sequence parallelism each rank has the gradients of its tokens; split parameters see all of them."""
        gradients = [gradient(parameter) for parameter in self._parameters(split=False)]
        if self.part.sequence:
            average(gradients, self.part.group)
            for tensor in gradients:
                tensor *= self.part.size

    def _parameters(self, split: bool) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.model.named_parameters() if (name in self.splits) == split]

    def _clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """The first rank counts what every rank has."""
        counted = [*self._parameters(split=True), *(self._parameters(split=False) if self.part.rank == 0 else [])]
        clip_parts(parameters, max_norm, counted, self.part.group)

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        self.statistics.settle()
        shared = self._shared(batch)
        output = evaluate(self.model, self._whole_logits, shared, self.job, self.count)
        return output if batch is not None else None

    def _whole_logits(self, inputs: Tensor) -> Tensor:
        return whole_logits(self.model(inputs), self.job, self.part)

    def flush(self) -> None:
        """Nothing is in flight between steps."""

    def state(self) -> dict[str, Tensor] | None:
        self.statistics.settle()
        return joined_state(whole_state(self.model), self.splits, self.part) if self.data_rank == 0 else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(own_state(state, self.splits, self.part))

    def facts(self) -> dict[str, Any]:
        return {
            "staleness": 0,
            "dp": self.dp,
            "tp": self.part.size,
            "sequence_parallel": self.part.sequence,
            "parallel_loss": self.parallel_loss and self.part.size > 1,
            "parameters_per_rank": sum(parameter.numel() for parameter in self.model.parameters()),
            "reduce_dtype": self.job.reduce_dtype if self.dp > 1 else "fp32",
        }

    def close(self) -> None:
        drop(self, "statistics", "trained", "model", "optimizer", "update")
