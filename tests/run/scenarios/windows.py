"""Profiled windows of real trainings, in this process's group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddlbench.job import Framework
from ddlbench.loop import Run
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.ranks.control import barrier
from ddlbench.run.scenarios import profiled
from tests.support.equal import Rows, feed_of, make_job
from tests.support.reference import Case


def windows(
    case: Case, frameworks: Mapping[str, Framework], steps: int, change: Callable[[Any, int], Any] = lambda own, _: own
) -> dict[str, dict[str, Any]]:
    """The section of every framework's window. change: (trainer, rank) -> what trains in its place"""
    linear, sections = torch.nn.functional.linear, dict[str, dict[str, Any]]()
    for name, framework in frameworks.items():
        job = make_job(case)
        framework.check(job)
        trainer = framework.setup(job)
        feed = feed_of(case, job, trainer.place)
        run = Run(job, trainer.place, feed, 1, 0, Rows(), Progress(False), Boundary(job.device))
        sections[name], _ = profiled(run, change(trainer, job.rank), trainer.facts(), steps)
        feed.close()
        barrier()
        trainer.close()
        torch.nn.functional.linear = linear  # DeepSpeed's stage 3 leaves its own there
    return sections
