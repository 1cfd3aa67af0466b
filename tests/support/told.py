"""Mixins: a framework that is given something else than the case says. `class ToldDDP(Told, DDP)`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddlbench.job import Job, Trainer


@dataclass
class Told:
    """A job that was changed on the way."""

    changes: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    def setup(self, job: Job) -> Trainer:
        return super().setup(replace(job, **self.changes))  # pyright: ignore


class Loaded:
    """Weights of another seed, and the case's own loaded after setup: they count from the first step on."""

    def setup(self, job: Job) -> Trainer:
        trainer: Trainer = super().setup(replace(job, seed=99))  # pyright: ignore
        torch.manual_seed(job.seed)
        trainer.load(job.model.build().state_dict())
        return trainer
