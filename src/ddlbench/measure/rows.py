"""From what each rank saw of an epoch to one row of epochs.jsonl. The slowest rank counts."""

from __future__ import annotations

import math
import platform
import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np

from ddlbench.errors import Diverged
from ddlbench.job import Job, Place
from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.counts import require_samples
from ddlbench.measure.devices.memory import BY_STAGE, PEAKS, peaks
from ddlbench.measure.devices.meter import OverRanks
from ddlbench.measure.straggler import OwnStep
from ddlbench.ranks.boundary import REMEDY
from ddlbench.ranks.control import all_gather, gather_to_rank0


@dataclass(frozen=True)
class RankEpoch:
    """One rank's epoch: seconds, bytes, the loss of each step (empty where the rank does not report).

    samples: of all its batches; None on a rank that does not report
    """

    rank: int
    data_rank: int
    times: EpochTimes
    losses: Sequence[float]
    rates: Sequence[float]
    memory: dict[str, int | None]
    samples: int | None = None
    host: str = ""
    coordinates: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def stage(self) -> int:
        return self.coordinates.get("pp", 0)

    @property
    def own_step_s(self) -> float | None:
        """Mean over the epoch's steps of the training thread's own seconds, what it read itself left out. None where
        nothing was trained (mode=loader): what is left of such a step is the loop's own work."""
        use, times = self.times.use, self.times
        if use is None or use.thread_s is None or not self.rates:
            return None
        return (use.thread_s - times.loading_s) / len(times.step_s)

    @classmethod
    def of(cls, job: Job, place: Place, times: EpochTimes, losses: list[float], rates: list[float]) -> RankEpoch:
        return cls(
            job.rank,
            place.data_rank,
            times,
            losses,
            rates,
            peaks(job.device),
            sum(times.samples) if place.reports else None,
            platform.node(),
            dict(place.coordinates),
        )

    def packed(self) -> RankEpoch:
        """The same in 8 bytes a number, for rank 0 gathers a thousand ranks: as objects they would need 32 and more."""
        times = self.times
        seconds = {name: array("d", getattr(times, name)) for name in ("step_s", "wait_s", "host_wait_s")}
        times = replace(times, **seconds, samples=array("q", times.samples))
        return replace(self, times=times, losses=array("d", self.losses), rates=array("d", self.rates))


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
    first_step_s: float
    steady_samples: int
    steady_time_s: float | None  # None: no second measured step
    host_wait_share: float
    use: OverRanks
    rank_stages: list[int]  # the pipeline stage of each rank
    stage_memory: dict[str, list[int | None]]  # the fullest rank of each stage
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
        of_ranks = (np.asarray(rank.times.step_s) for rank in self.ranks)
        return reduce(np.maximum, of_ranks).tolist() if self.ranks else []

    @cached_property
    def own_steps(self) -> list[OwnStep]:
        """Each rank's own seconds of a step; on rank 0, empty elsewhere and where a rank does not know it."""
        known = [OwnStep(rank.rank, rank.host, rank.stage, own) for rank in self.ranks if (own := rank.own_step_s)]
        return known if len(known) == len(self.ranks) else []

    def forget_ranks(self) -> None:
        """Keep of every rank's steps only the slowest: a thousand ranks and epochs would not fit into memory."""
        self.slowest_s, self.own_steps = self.slowest_s, self.own_steps
        self.ranks = []

    def line(self) -> dict[str, Any]:
        """The row as epochs.jsonl has it: flat, null for what is not known."""
        own = {name: value for name, value in vars(self).items() if name not in NOT_IN_LINE}
        loss = None if self.train_loss is None or not math.isfinite(self.train_loss) else self.train_loss
        return {**own, "train_loss": loss, **self.metrics, **self.use.line(), **self.memory}


NOT_IN_LINE = (
    "memory", "metrics", "ranks", "slowest_s", "own_steps", "bad_step", "train_loss", "use", "rank_stages",
    "stage_memory",
)  # fmt: skip


def gather_epoch(epoch: int, epochs: int, rank: RankEpoch, global_batch: int, updates: int, first: int = 0) -> EpochRow:
    """The row of an epoch, the same on every rank. first: the attempt's first epoch, where it continues another one."""
    times = rank.times
    bad = next((step for step, loss in enumerate(rank.losses) if not math.isfinite(loss)), None)
    figures = all_gather((times.epoch_s, times.measured_s, times.straggler_s, _wait_share(times), rank.memory))
    losses = all_gather((sum(rank.losses), len(rank.losses), bad))
    others = all_gather(
        (times.step_s[0], _steady_s(times), _host_wait_share(times), rank.stage, rank.samples, times.use, rank.host)
    )
    epoch_s, measured_s, straggler_s, wait_share, memory = zip(*figures, strict=True)
    loss_sum, loss_count, bad_steps = zip(*losses, strict=True)
    first_step_s, steady_s, host_wait_share, stages, samples, uses, hosts = zip(*others, strict=True)
    steps, steady_steps = len(times.step_s), _steady_steps(times)
    require_samples(samples, steps * global_batch)
    return EpochRow(
        epoch=epoch,
        steps=steps,
        samples=steps * global_batch,
        updates=updates,
        warmup=epoch == first and epochs - first > 1,
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
        first_step_s=max(first_step_s),
        steady_samples=steady_steps * global_batch,
        steady_time_s=max(steady_s) if steady_steps else None,
        host_wait_share=max(host_wait_share),
        use=OverRanks.of(uses, hosts),
        rank_stages=list(stages),
        stage_memory={name: _by_stage(stages, [peak[name] for peak in memory]) for name in BY_STAGE},
        ranks=gather_to_rank0(rank.packed()),
    )


def _wait_share(times: EpochTimes) -> float:
    """Waiting for data as a share of the measured steps' time on this rank."""
    return sum(times.wait_s[times.warmup_steps :]) / times.measured_s


def _host_wait_share(times: EpochTimes) -> float:
    return sum(times.host_wait_s[times.warmup_steps :]) / times.measured_s


def _steady_steps(times: EpochTimes) -> int:
    """Measured steps without the epoch's first, which the warm-up steps may have left out already."""
    return times.measured_steps - (times.warmup_steps == 0)


def _steady_s(times: EpochTimes) -> float:
    return times.measured_s - (0.0 if times.warmup_steps else times.step_s[0])


def _by_stage(stages: Sequence[int], values: Sequence[int | None]) -> list[int | None]:
    """The largest over the ranks of each pipeline stage."""
    pairs = list(zip(stages, values, strict=True))
    return [_largest([value for place, value in pairs if place == stage]) for stage in sorted(set(stages))]


def _largest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
