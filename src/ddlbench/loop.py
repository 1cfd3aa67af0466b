"""The one training loop. It names no framework: each turns a batch into one weight update behind `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ddlbench.data.feed import Feed
from ddlbench.job import Job, Place, Trainer
from ddlbench.measure.clock import EpochClock
from ddlbench.measure.memory import reset_peaks
from ddlbench.measure.metrics import batch_sums, empty_sums, finish
from ddlbench.measure.rows import EpochRow, RankEpoch, gather_epoch
from ddlbench.progress import Progress
from ddlbench.ranks.control import barrier, total
from ddlbench.ranks.health import Health


class Recorder(Protocol):
    """Where rows go: files on the first rank, nowhere on the others."""

    def begin(self, run: Run, spans: Mapping[str, float], hosts: Sequence[str]) -> None: ...

    def epoch(self, run: Run, row: EpochRow) -> None: ...

    def end(self, run: Run, feeds: Sequence[Mapping[str, Any]]) -> None: ...


@dataclass
class Run:
    """One run, set up and ready to train."""

    job: Job
    framework: Trainer | None  # None: nothing is trained, loading.py takes the batches
    place: Place
    feed: Feed
    learning_rate: Callable[[int], float]  # training step, counted over epochs -> learning rate
    epochs: int
    warmup_steps: int
    recorder: Recorder
    progress: Progress
    alive: Callable[[], None] = lambda: None  # told at every step, so that a hang is noticed
    validate: bool = True
    val_words: int | None = None
    elapsed_s: float = 0.0
    rates: list[float] = field(default_factory=list[float])

    def warmup(self, epoch: int) -> int:
        """Steps that begin this epoch and are left out of its rate; never all of them."""
        return min(self.warmup_steps, self.feed.steps_per_epoch - 1) if epoch == 0 else 0

    def record(self, row: EpochRow) -> None:
        """Put an epoch and its validation behind us."""
        self.elapsed_s += row.epoch_time_s + row.metrics.get("validation_time_s", 0.0)
        row.elapsed_s = self.elapsed_s
        self.recorder.epoch(self, row)


def train(run: Run) -> None:
    """Every epoch: train against the clock, reduce over ranks, validate outside it, record."""
    device, framework = run.job.device, run.framework
    assert framework is not None
    for epoch in range(run.epochs):
        clock, health = EpochClock(device, barrier, run.warmup(epoch)), Health(device)
        losses: list[Tensor] = []
        reset_peaks(device)
        batches = run.progress.steps(run.feed.train(epoch), run.feed.steps_per_epoch, f"epoch {epoch}")
        for step, batch in enumerate(clock.steps(batches)):
            set_learning_rate(framework.optimizer, run.learning_rate(len(run.rates)))
            loss = framework.step(batch)
            run.rates.append(framework.optimizer.param_groups[0]["lr"])
            if loss is not None:
                losses.append(loss)
            health.watch(losses, step)
            run.alive()
        framework.flush()
        times = clock.stop()
        health.count(len(times.step_s))
        rank = RankEpoch.of(run.job, run.place, times, losses, run.rates[-len(times.step_s) :])
        row = gather_epoch(epoch, run.epochs, rank, run.job.global_batch, framework.updates)
        row.metrics = validate(run, framework) if run.validate and row.finite else {}
        run.record(row)
        row.require_finite()


def validate(run: Run, framework: Trainer) -> dict[str, Any]:
    """Every validation sample once, over all replicas; sums are added first, metrics computed from the sums."""
    clock = EpochClock(run.job.device, barrier)
    sums = empty_sums(run.job.device)
    for batch in clock.steps(run.feed.validation()):
        output = framework.evaluate(batch)
        if output is not None:
            assert batch is not None
            sums += batch_sums(output, batch)
        run.alive()
    times = clock.stop()
    metrics = finish(total(sums), run.job.model.kind, run.val_words)
    return {**metrics, "validation_time_s": times.epoch_s + times.straggler_s}


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
