"""Local SGD (Stich 2019; Lin et al. 2020): replicas train alone for k steps, then their weights are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.shared.batchnorm import average, average_statistics
from ddlbench.frameworks.shared.common import (
    Update,
    accumulate,
    check_alike,
    checkpoint_blocks,
    drop,
    evaluate,
    whole_state,
)
from ddlbench.job import Batch, Job, Place


@dataclass
class LocalSGD:
    """Weights and BatchNorm's statistics are averaged; momentum and the norm for clipping stay each replica's own."""

    name: str = "local_sgd"
    local_steps: int = 8

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise UserError(f"framework.local_steps={self.local_steps} must be 1 or more updates between two averages")

    def check(self, job: Job) -> None:
        if job.reduce_dtype != "fp32":
            raise Unsupported(
                f"local_sgd sends weights, which are fp32, and no gradients in {job.reduce_dtype}: "
                "set train.reduce_dtype=fp32"
            )
        if job.precision == "fp16":
            raise Unsupported("local_sgd: in fp16 each replica would skip updates of its own: set train.precision=bf16")
        check_alike(job, job.world_size)

    def setup(self, job: Job) -> Place:
        self.job, self.count = job, job.micro_batches(job.world_size)
        self.model = job.build()
        if job.checkpoint_activations:
            checkpoint_blocks(self.model)
        if job.compile:
            self.model.compile()
        self.optimizer = job.optimizer(self.model.named_parameters())
        self.update = Update(self.optimizer, job)
        self.alone = 0  # updates since all replicas were the same
        return Place(job.rank, job.world_size, coordinates={"dp": job.rank})

    @property
    def updates(self) -> int:
        return self.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        loss = accumulate(self.model, batch, self.job, self.count, self.update)
        self.update.apply(self.model.parameters())
        self.alone += 1
        if self.alone == self.local_steps:
            self.flush()
        return loss

    def flush(self) -> None:
        """All replicas become their mean: every `local_steps`, at the end of an epoch, before anybody looks at them."""
        if self.alone:
            with torch.no_grad(), record_function("ddlbench/communicate"):
                average(list(self.model.parameters()))
                average_statistics(self.model)
            self.alone = 0

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        self.flush()
        return evaluate(self.model, self.model, batch, self.job, self.count)

    def state(self) -> dict[str, Tensor] | None:
        self.flush()
        return whole_state(self.model) if self.job.rank == 0 else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)
        self.alone = 0

    def facts(self) -> dict[str, Any]:
        return {"staleness": 0, "local_steps": self.local_steps, "reduce_dtype": "fp32"}

    def close(self) -> None:
        drop(self, "model", "optimizer", "update")
