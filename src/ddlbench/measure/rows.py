"""From what each rank saw of an epoch to one row of epochs.jsonl. The slowest rank counts."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ddlbench.errors import Diverged
from ddlbench.job import Job, Place
from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.memory import PEAKS, peaks
from ddlbench.ranks.boundary import REMEDY
from ddlbench.ranks.control import all_gather, gather_to_rank0


@dataclass(frozen=True)
class RankEpoch:
    """One rank's epoch: seconds, bytes, the loss of each step (empty where the rank does not report)."""

    rank: int
    data_rank: int
    times: EpochTimes
    losses: list[float]
    rates: list[float]
    memory: dict[str, int | None]

    @classmethod
    def of(cls, job: Job, place: Place, times: EpochTimes, losses: list[Tensor], rates: list[float]) -> RankEpoch:
        values = torch.stack(losses).float().cpu().tolist() if losses else []
        return cls(job.rank, place.data_rank, times, values, rates, peaks(job.device))


@dataclass
class EpochRow:
    """One epoch over all ranks; `ranks` holds every rank's steps on rank 0 and nothing elsewhere."""

    epoch: int
    steps: int
    samples: int
    updates: int
    warmup: bool  # left out of the headline
    epoch_time_s: float
    epoch_time_fastest_rank_s: float
    epoch_time_median_rank_s: float
    straggler_wait_s: float
    measured_steps: int
    measured_samples: int
    measured_time_s: float
    data_wait_share: float
    train_loss: float | None  # None, and so the rate: nothing was trained
    bad_step: int | None
    lr_last: float | None
    memory: dict[str, int | None]
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    elapsed_s: float = 0.0
    ranks: list[RankEpoch] = field(default_factory=list[RankEpoch])

    @property
    def finite(self) -> bool:
        return self.bad_step is None

    def require_finite(self) -> None:
        """Raise Diverged on every rank alike."""
        if not self.finite:
            raise Diverged(f"the loss is not finite at epoch {self.epoch}, step {self.bad_step}: {REMEDY}")
        if not math.isfinite(self.metrics.get("val_loss") or 0.0):
            raise Diverged(f"the validation loss is not finite after epoch {self.epoch}: {REMEDY}")

    @cached_property
    def slowest_s(self) -> list[float]:
        """Seconds of each step on the rank that took longest for it; on rank 0, empty elsewhere."""
        return [max(seconds) for seconds in zip(*(rank.times.step_s for rank in self.ranks), strict=True)]

    def forget_ranks(self) -> None:
        """Keep of every rank's steps only the slowest: a thousand ranks and epochs would not fit into memory."""
        self.slowest_s = self.slowest_s
        self.ranks = []

    def line(self) -> dict[str, Any]:
        """The row as epochs.jsonl has it: flat, null for what is not known."""
        own = {
            name: value
            for name, value in vars(self).items()
            if name not in ("memory", "metrics", "ranks", "slowest_s", "bad_step", "train_loss")
        }
        loss = None if self.train_loss is None or not math.isfinite(self.train_loss) else self.train_loss
        return {**own, "train_loss": loss, **self.metrics, **self.memory}


def gather_epoch(epoch: int, epochs: int, rank: RankEpoch, global_batch: int, updates: int) -> EpochRow:
    """The row of an epoch, the same on every rank."""
    times = rank.times
    bad = next((step for step, loss in enumerate(rank.losses) if not math.isfinite(loss)), None)
    figures = all_gather((times.epoch_s, times.measured_s, times.straggler_s, _wait_share(times), rank.memory))
    losses = all_gather((sum(rank.losses), len(rank.losses), bad))
    epoch_s, measured_s, straggler_s, wait_share, memory = zip(*figures, strict=True)
    loss_sum, loss_count, bad_steps = zip(*losses, strict=True)
    steps = len(times.step_s)
    return EpochRow(
        epoch=epoch,
        steps=steps,
        samples=steps * global_batch,
        updates=updates,
        warmup=epoch == 0 and epochs > 1,
        epoch_time_s=max(epoch_s),
        epoch_time_fastest_rank_s=min(epoch_s),
        epoch_time_median_rank_s=statistics.median(epoch_s),
        straggler_wait_s=max(straggler_s),
        measured_steps=times.measured_steps,
        measured_samples=times.measured_steps * global_batch,
        measured_time_s=max(measured_s),
        data_wait_share=max(wait_share),
        train_loss=sum(loss_sum) / sum(loss_count) if any(loss_count) else None,
        bad_step=min((step for step in bad_steps if step is not None), default=None),
        lr_last=rank.rates[-1] if rank.rates else None,
        memory={name: _largest([peak[name] for peak in memory]) for name in PEAKS},
        ranks=gather_to_rank0(rank),
    )


def _wait_share(times: EpochTimes) -> float:
    """Waiting for data as a share of the measured steps' time on this rank."""
    return sum(times.wait_s[times.warmup_steps :]) / times.measured_s


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
