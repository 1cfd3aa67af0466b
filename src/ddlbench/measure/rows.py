"""From what each rank saw of an epoch to one row of epochs.jsonl. The slowest rank counts."""

from __future__ import annotations

import math
import socket
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from ddlbench.errors import Diverged, RunError
from ddlbench.job import Job, Place
from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.devices.memory import BY_STAGE, PEAKS, peaks
from ddlbench.measure.devices.meter import over_ranks
from ddlbench.measure.devices.unknown import largest
from ddlbench.measure.devices.usage import Load
from ddlbench.ranks.boundary import REMEDY
from ddlbench.ranks.control import all_gather, from_rank_0, gather_to_rank0


@dataclass(frozen=True)
class RankEpoch:
    """One rank's epoch: seconds, bytes, the loss of each step (empty where the rank does not report).

    samples: of all its batches; None on a rank that does not report
    bad_samples: names of those that this rank could not read since the run began
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
    bad_samples: tuple[str, ...] = ()

    @property
    def stage(self) -> int:
        return self.coordinates.get("pp", 0)

    @classmethod
    def of(
        cls, job: Job, place: Place, times: EpochTimes, losses: list[float], rates: list[float], bad: Iterable[str]
    ) -> RankEpoch:
        return cls(
            rank=job.rank,
            data_rank=place.data_rank,
            times=times,
            losses=losses,
            rates=rates,
            memory=peaks(job.device),
            samples=sum(times.samples) if place.reports else None,
            host=socket.gethostname(),
            coordinates=dict(place.coordinates),
            bad_samples=tuple(bad),
        )

    def packed(self) -> RankEpoch:
        """The epoch with 8 bytes for a number: rank 0 gathers a thousand ranks, and objects need 32 bytes and more."""
        times = self.times
        seconds = {name: array("d", getattr(times, name)) for name in ("step_s", "wait_s", "host_wait_s")}
        times = replace(times, **seconds, samples=array("q", times.samples))
        return replace(self, times=times, losses=array("d", self.losses), rates=array("d", self.rates))


@dataclass(frozen=True)
class OwnStep:
    """One rank's own seconds of a step, a mean or median over steps.

    stage: rank in its pipeline; only ranks with the same one have the same work
    """

    rank: int
    host: str
    stage: int
    seconds: float


@dataclass
class EpochRow:
    """One epoch over all ranks; None for what is not known, because a part of the ranks is no result.

    energy_j, energy_time_s: the sum of all counters; between the readings, on the rank where they are furthest apart
    cpu_time_s, sent_bytes: sums over the ranks: seconds of a core, bytes through TCP
    device_clock_before_mhz, device_clock_after_mhz: the lowest of all GPUs
    throttled: why the clock of any GPU had been lowered
    loads: of each node, before and after
    slowest_s: seconds of each step on the rank that took longest for it; on rank 0, empty elsewhere
    own_steps: each rank's own seconds of a step; on rank 0, empty elsewhere and where a rank does not know it
    ranks: every rank's epoch on rank 0 until it is recorded, nothing elsewhere
    """

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
    stage_memory: dict[str, list[int | None]]  # of ranks with the same stages, the fullest
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    elapsed_s: float = 0.0
    energy_j: float | None = None
    energy_source: str | None = None
    energy_time_s: float | None = None
    cpu_time_s: float | None = None
    sent_bytes: int | None = None
    device_clock_before_mhz: int | None = None
    device_clock_after_mhz: int | None = None
    throttled: tuple[str, ...] = ()
    loads: tuple[tuple[Load, Load], ...] = ()
    slowest_s: list[float] = field(default_factory=list[float])
    own_steps: list[OwnStep] = field(default_factory=list[OwnStep])
    ranks: list[RankEpoch] = field(default_factory=list[RankEpoch])

    @property
    def finite(self) -> bool:
        return self.bad_step is None

    def require_finite(self) -> None:
        """Raise Diverged on every rank."""
        if not self.finite:
            raise Diverged(f"the loss is not finite at epoch {self.epoch}, step {self.bad_step}: {REMEDY}")
        if not math.isfinite(self.metrics.get("val_loss") or 0.0):
            raise Diverged(f"the validation loss is not finite after epoch {self.epoch}: {REMEDY}")

    def with_ranks(self, ranks: list[RankEpoch]) -> EpochRow:
        """The row as rank 0 has it: with every rank's epoch, and what stays of them when the epoch is recorded."""
        step_s = (np.asarray(rank.times.step_s) for rank in ranks)
        own_steps: list[OwnStep] = []
        for rank in ranks:
            use, times = rank.times.use, rank.times
            # Where nothing was trained (mode=loader) only the loop's own work is left of a step.
            if use is not None and use.thread_s is not None and rank.rates:
                # The training thread's own seconds, without what it read itself: a mean over the epoch.
                own_s = (use.thread_s - times.loading_s) / len(times.step_s)
                own_steps.append(OwnStep(rank.rank, rank.host, rank.stage, own_s))
        complete = own_steps if len(own_steps) == len(ranks) else []
        return replace(self, ranks=ranks, slowest_s=reduce(np.maximum, step_s).tolist(), own_steps=complete)

    def line(self) -> dict[str, Any]:
        """The row as epochs.jsonl has it: flat, null for what is not known."""
        columns = {name: value for name, value in vars(self).items() if name not in NOT_IN_LINE}
        loss = None if self.train_loss is None or not math.isfinite(self.train_loss) else self.train_loss
        reasons = ", ".join(self.throttled) or None
        return {**columns, "train_loss": loss, **self.metrics, "throttle_reasons": reasons, **self.memory}


NOT_IN_LINE = (
    "memory", "metrics", "ranks", "slowest_s", "own_steps", "bad_step", "train_loss", "stage_memory", "energy_source",
    "throttled", "loads",
)  # fmt: skip


def gather_epoch(epoch: int, epochs: int, here: RankEpoch, global_batch: int, updates: int, first: int = 0) -> EpochRow:
    """The row of an epoch, made on rank 0, the same on every rank. Collective; RunError, on every rank, where samples
    are missing or doubled. first: the attempt's first epoch, where it continues another one."""
    require_samples(all_gather(here.samples), len(here.times.step_s) * global_batch)
    ranks: list[RankEpoch] = gather_to_rank0(here.packed())
    warmup = epoch == first and epochs - first > 1
    row: EpochRow = from_rank_0(_row(epoch, warmup, ranks, global_batch, updates) if ranks else None)
    return row.with_ranks(ranks) if ranks else row


def _row(epoch: int, warmup: bool, ranks: Sequence[RankEpoch], global_batch: int, updates: int) -> EpochRow:
    here, times = ranks[0], ranks[0].times
    steps, steady_steps = len(times.step_s), times.measured_steps - (times.warmup_steps == 0)
    losses = sum(len(rank.losses) for rank in ranks)
    bad_steps = (step for rank in ranks for step, loss in enumerate(rank.losses) if not math.isfinite(loss))
    stages = sorted({rank.stage for rank in ranks})
    return EpochRow(
        epoch=epoch,
        steps=steps,
        samples=steps * global_batch,
        updates=updates,
        warmup=warmup,
        epoch_time_s=max(rank.times.epoch_s for rank in ranks),
        epoch_time_fastest_rank_s=min(rank.times.epoch_s for rank in ranks),
        epoch_time_median_rank_s=statistics.median(rank.times.epoch_s for rank in ranks),
        straggler_wait_s=max(rank.times.straggler_s for rank in ranks),
        measured_steps=times.measured_steps,
        measured_samples=times.measured_steps * global_batch,
        measured_time_s=max(rank.times.measured_s for rank in ranks),
        data_wait_share=max(rank.times.wait_share for rank in ranks),
        train_loss=sum(sum(rank.losses) for rank in ranks) / losses if losses else None,
        bad_step=min(bad_steps, default=None),
        lr_last=here.rates[-1] if here.rates else None,
        memory={name: largest(rank.memory[name] for rank in ranks) for name in PEAKS},
        first_step_s=max(rank.times.step_s[0] for rank in ranks),
        steady_samples=steady_steps * global_batch,
        steady_time_s=max(rank.times.steady_s for rank in ranks) if steady_steps else None,
        host_wait_share=max(rank.times.host_wait_share for rank in ranks),
        stage_memory={
            name: [largest(rank.memory[name] for rank in ranks if rank.stage == stage) for stage in stages]
            for name in BY_STAGE
        },
        **over_ranks([rank.times.use for rank in ranks], [rank.host for rank in ranks]),
    )


def require_samples(counted: Sequence[int | None], asked: int) -> None:
    """Raise RunError, on every rank, unless an epoch's batches held what its steps ask for.

    counted: samples of the batches of each rank; None on a rank that does not report
    """
    reported = [count for count in counted if count is not None]
    if sum(reported) != asked:
        raise RunError(
            f"the batches of the {len(reported)} reporting ranks held {sum(reported)} training samples in an epoch "
            f"whose steps have {asked}: report this as a bug of the loader or of the framework's layout"
        )


def require_val_samples(counted: int, expected: int, unread_here: int) -> None:
    """Raise RunError, on every rank, unless every validation sample was counted once, except those that could
    not be read (data.on_bad_sample=skip).

    counted, expected: over all ranks
    unread_here: that this rank could not read; 0 where another rank reports for its replica
    """
    if counted == expected:
        return
    unread = sum(all_gather(unread_here))
    if counted + unread != expected:
        raise RunError(
            f"{counted} validation samples were counted and {unread} could not be read, of {expected}: "
            "report this as a bug of the loader or of the framework's layout"
        )
