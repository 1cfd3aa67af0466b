"""The one training loop. It names no framework: a framework turns a batch into one weight update, as a `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer

from ddlbench.data.feed import Feed
from ddlbench.errors import Stopped
from ddlbench.job import Job, Place, Trainer
from ddlbench.measure.clock import EpochClock
from ddlbench.measure.devices.memory import reset_peaks
from ddlbench.measure.devices.meter import Meter
from ddlbench.measure.formulas.metrics import batch_sums, empty_sums, finish, without_scores
from ddlbench.measure.rows import EpochRow, RankEpoch, gather_epoch, require_val_samples
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.ranks.control import barrier, sum_over_ranks
from ddlbench.recipe.recipe import Rates


class Scenario(Protocol):
    """What one attempt does. The methods are called in this order, on every rank; `facts` and `ledger` on rank 0, from
    `begin` on."""

    def check(self) -> None:
        """Raise Unsupported or Unavailable for what cannot be run; called before any process group exists."""
        ...

    def setup(self) -> Place:
        """Set up what needs process groups; return the position of this rank."""
        ...

    def begin(self, feed: Feed) -> dict[str, Any]:
        """The data are open. Returns the record's section `model`."""
        ...

    def run(self, run: Run) -> None:
        """Run every epoch, and hand each one to `run.record`."""
        ...

    def close(self) -> None:
        """Drop what `setup` has made, also if it failed half-way: process groups are destroyed afterwards."""

    def facts(self) -> dict[str, Any]:
        """The record's section `framework`."""
        return {}

    def ledger(self, run: Run, steps: int) -> dict[str, Any]:
        """The record's section `ledger` after `steps` steps."""
        ...


class Recorder:
    """Takes the rows. This one drops them; rank 0 has a `FileRecorder`, which writes files."""

    def begin(self, run: Run, spans: Mapping[str, float], hosts: Sequence[str]) -> None: ...

    def epoch(self, run: Run, row: EpochRow) -> None: ...

    def window(self, section: Mapping[str, Any], save_trace: Callable[[Path], None]) -> None: ...

    def end(self, run: Run, feeds: Sequence[Mapping[str, Any]]) -> None: ...


@dataclass
class Run:
    """What every scenario has: this rank's place, its samples, and where rows go.

    scored: whether metrics of the validation samples say something about the model
    open_checkpoints: called on every rank before training; may set the next two
    after_epoch: called on every rank once an epoch is recorded, outside all clocks
    first_epoch: the first one of this attempt; above 0 if it continues another attempt
    """

    job: Job
    place: Place
    feed: Feed
    epochs: int
    warmup_steps: int
    recorder: Recorder
    progress: Progress
    boundary: Boundary
    validate: bool = True
    val_words: int | None = None
    scored: bool = True
    meter: Meter | None = None
    elapsed_s: float = 0.0
    open_checkpoints: Callable[[Run, Trainer, Rates], None] = lambda *_: None
    after_epoch: Callable[[int], None] = lambda _: None
    first_epoch: int = 0
    clock: EpochClock | None = None  # of the last epoch that has begun

    def begin(self, epoch: int) -> EpochClock:
        """The clock of an epoch, which starts with its first step; the peaks of memory start anew with it."""
        device, steps = self.job.device, self.feed.steps_per_epoch
        self.boundary.begin(epoch, steps)
        # The steps that are left out of the rate; never all of them.
        warmup = min(self.warmup_steps, steps - 1) if epoch == self.first_epoch else 0
        self.clock = EpochClock(device, barrier, warmup, self.meter, partial(reset_peaks, device))
        return self.clock

    def validated(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """What may be reported of a validation. RunError, on every rank, if samples are missing or counted twice."""
        unread = self.feed.val_unread if self.place.reports else 0
        require_val_samples(metrics["val_samples"], self.feed.val_samples, unread)
        return metrics if self.scored else without_scores(metrics)

    def record(self, row: EpochRow, validated: Callable[[], dict[str, Any]]) -> None:
        """Hand over the row of an epoch with the metrics that `validated` returns, or without them if the run is
        stopped meanwhile."""
        stopped: Stopped | None = None
        try:
            row.metrics |= validated()
        except Stopped as error:
            stopped = error
        row.elapsed_s = self.elapsed_s = self.elapsed_s + row.epoch_time_s + row.metrics.get("validation_time_s", 0.0)
        self.recorder.epoch(self, row)
        if stopped:
            raise stopped


def train(run: Run, trainer: Trainer, rates: Rates) -> None:
    """Every epoch: train against the clock, reduce over ranks, validate once it has stopped, record."""
    for epoch in range(run.first_epoch, run.epochs):
        clock = run.begin(epoch)
        used = list[float]()
        batches = run.progress.steps(run.feed.train(epoch), run.feed.steps_per_epoch, f"epoch {epoch}")
        for batch in clock.steps(batches):
            set_learning_rate(trainer.optimizer, rates.of_step(rates.step))
            loss = trainer.step(batch)
            used.append(rates.used(trainer.optimizer.param_groups[0]["lr"]))
            run.boundary.pass_step(loss)
        trainer.flush()
        times = clock.stop()
        run.boundary.require_finite()
        rank = RankEpoch.of(
            run.job, run.place, times, run.boundary.losses.tolist(), used, run.feed.facts()["bad_samples"]
        )
        row = gather_epoch(epoch, run.epochs, rank, run.job.global_batch, trainer.updates, run.first_epoch)
        run.record(row, partial(validate, run, trainer) if run.validate and row.finite else dict)
        row.require_finite()
        run.after_epoch(epoch)


def validate(run: Run, trainer: Trainer) -> dict[str, Any]:
    """Every validation sample once, over all replicas; sums are added first, metrics computed from the sums."""
    clock = EpochClock(run.job.device, barrier)
    sums = empty_sums(run.job.device)
    for batch in clock.steps(run.feed.validation()):
        trainer.evaluate(batch, lambda output, samples: sums.add_(batch_sums(output, samples)))
        run.boundary.heartbeat()
    times = clock.stop()
    metrics = finish(sum_over_ranks(sums), run.job.model.kind, run.val_words)
    return {**run.validated(metrics), "validation_time_s": times.epoch_s + times.straggler_s}


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
