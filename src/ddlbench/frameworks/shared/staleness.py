"""How old the weights of gradients are, counted while a framework trains with old ones."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddlbench.measure.profiling.spans import profiling
from ddlbench.ranks.control import AsyncReduction


class Staleness:
    """Updates between the weights of a gradient and the weights that it updates: the most on each stage of a pipeline,
    or, where every rank has all weights, on each rank (a stage in the names below)."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages = stage, stages
        self.most: int | None = None  # on this rank's stage, None before its first update
        self.gathered: AsyncReduction | None = None

    def count(self, updates: int) -> None:
        """Count an update of this stage. updates: those made since the weights of its gradient"""
        self.most = max(updates, self.most or 0)

    def gather(self) -> None:
        """At the end of an epoch, on every rank: start to collect; no rank waits for another."""
        if self.most is None or profiling():
            return
        by_stage = torch.zeros(self.stages, dtype=torch.int64)
        by_stage[self.stage] = self.most
        self.gathered = AsyncReduction(by_stage, dist.ReduceOp.MAX)

    def by_stage(self) -> list[int] | None:
        """Over the epochs that have ended; None before the first. Waits until every rank has started to collect."""
        return self.gathered.result() if self.gathered else None
