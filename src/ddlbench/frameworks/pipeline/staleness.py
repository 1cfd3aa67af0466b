"""How old the weights of each stage's gradients were, counted where its updates are made."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddlbench.measure.profiling.spans import profiling
from ddlbench.ranks.control import AsyncReduction


class Staleness:
    """Updates between the weights of a gradient and the weights that it updates: the most on each stage."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages = stage, stages
        self.most: int | None = None  # on this rank's stage, None before its first update
        self.gathered: AsyncReduction | None = None

    def count(self, updates: int) -> None:
        """An update of this rank's stage; since its gradient's weights there were so many others."""
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
