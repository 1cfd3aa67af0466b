"""One process, no wrapper: the base of every comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddlbench.errors import Unsupported
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
class Single:
    """Plain PyTorch on one device."""

    name: str = "single"

    def check(self, job: Job) -> None:
        if job.world_size != 1:
            raise Unsupported(
                f"framework=single runs in one process, this launch has {job.world_size}: "
                "start one, or use +framework=ddp"
            )
        check_alike(job, 1)

    def setup(self, job: Job) -> Place:
        self.job = job
        self.model = job.build()
        if job.checkpoint_activations:
            checkpoint_blocks(self.model)
        if job.compile:
            self.model.compile()
        self.optimizer = job.optimizer(self.model.named_parameters())
        self.update = Update(self.optimizer, job)
        self.count = job.micro_batches(1)
        return Place(0, 1, coordinates={"dp": 0})

    @property
    def updates(self) -> int:
        return self.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        loss = accumulate(self.model, batch, self.job, self.count, self.update)
        self.update.apply(self.model.parameters())
        return loss

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        return evaluate(self.model, self.model, batch, self.job, self.count)

    def flush(self) -> None:
        """Nothing is in flight between steps."""

    def state(self) -> dict[str, Tensor] | None:
        return whole_state(self.model)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def facts(self) -> dict[str, Any]:
        return {"staleness": 0, "reduce_dtype": "fp32"}

    def close(self) -> None:
        drop(self, "model", "optimizer", "update")
