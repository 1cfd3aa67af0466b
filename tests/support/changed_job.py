"""Mixins: a framework with another job than that of the case. `class ChangedDDP(ChangedJob, DDP)`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddlbench.job import Job, Trainer


@dataclass
class ChangedJob:
    """Set up with a job of which `changes` are replaced."""

    changes: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    def setup(self, job: Job) -> Any:  # whatever the framework's own returns
        return super().setup(replace(job, **self.changes))  # pyright: ignore


class Loaded:
    """Set up with weights of another seed; the case's own are loaded afterwards, and training must start from them."""

    def setup(self, job: Job) -> Any:
        trainer: Trainer = super().setup(replace(job, seed=99))  # pyright: ignore
        torch.manual_seed(job.seed)
        trainer.load(job.model.build().state_dict())
        return trainer
