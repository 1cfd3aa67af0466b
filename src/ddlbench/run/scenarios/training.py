"""mode=train: a framework trains the model. profile=true: then a window of steps under torch's profiler.

The measured epochs are over and recorded when the window begins, so that it changes none of their numbers (ADR 16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ddlbench.config.schema import Config
from ddlbench.data.feed import Feed
from ddlbench.errors import RunError
from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks
from ddlbench.job import Batch, Job, Place, Trainer
from ddlbench.loop import Run, Scenario, train
from ddlbench.measure.clock import idle
from ddlbench.measure.profiling.profile import RankWindow, Seconds
from ddlbench.measure.profiling.profiler import Profiler
from ddlbench.measure.profiling.spans import DATA, WINDOW, span
from ddlbench.ranks.control import all_gather, barrier
from ddlbench.recipe.recipe import learning_rate
from ddlbench.recipe.schedules import Rates
from ddlbench.record.run_json import model_section, training_ledger
from ddlbench.run.checkpoints import check_checkpoints

LEAD_IN = 2  # steps before the window: loader workers start, pipelines that stay full between steps fill


@dataclass
class Training(Scenario):
    config: Config
    job: Job
    made: Trainer | None = None  # by `setup`
    rates: Rates = field(init=False)
    weights_hash: str | None = None  # of the initial model
    measured_facts: dict[str, Any] | None = None  # after the measured epochs, where steps follow that are not measured

    def check(self) -> None:
        self.config.framework.check(self.job)
        check_checkpoints(self.config, self.job)

    def setup(self) -> Place:
        self.made = self.config.framework.setup(self.job)
        return self.made.place

    def begin(self, feed: Feed) -> dict[str, Any]:
        epochs = self.config.train.epochs
        self.rates = Rates(learning_rate(self.config.recipe, self.job.global_batch, feed.steps_per_epoch, epochs))
        start = self.trainer.state()
        assert (start is None) == (self.job.rank != 0), "rank 0 alone has the full state"
        segments = self.trainer.facts().get("segments")
        checkpoint = partial(checkpoint_blocks, segments=segments) if segments else None
        model = model_section(self.config.model, start, checkpoint)
        self.weights_hash = model.get("weights_hash_start")
        return model

    def run(self, run: Run) -> None:
        run.open_checkpoints(run, self.trainer, self.rates)
        train(run, self.trainer, self.rates)
        if self.config.profile:
            self.measured_facts = self.trainer.facts()
            window = profiled(run, self.trainer, self.config.profile_steps)
            run.recorder.window(window.section(), window.profiler.save)
            if window.failure:
                raise RunError(window.failure)

    def facts(self) -> dict[str, Any]:
        return self.trainer.facts() if self.measured_facts is None else self.measured_facts

    def ledger(self, run: Run, steps: int) -> dict[str, Any]:
        trained = training_ledger(run, self.trainer, self.rates, self.config.recipe, steps)
        return trained | {"weights_hash_start": self.weights_hash}

    def close(self) -> None:
        if self.made is not None:
            self.made.close()
            self.made = None

    @property
    def trainer(self) -> Trainer:
        assert self.made is not None, "`setup` comes first"
        return self.made


@dataclass(frozen=True)
class Window:
    """A window over all ranks, the same on every rank; the profiler is this rank's."""

    ranks: list[RankWindow]
    lead_in: int
    on_device: bool
    profiler: Profiler

    @property
    def failure(self) -> str | None:
        """Why its shares cannot be right: training on several ranks communicates on each."""
        silent = [window.rank for window in self.ranks if not window.collectives]
        if len(self.ranks) == 1 or not silent:
            return None
        return (
            f"profile=true: no communication was seen on rank {silent[0]} of {len(self.ranks)} in "
            f"{self.ranks[0].steps} steps, so its share is unknown, not 0 (the epochs before are measured): "
            "run again with profile=false, or with profile_trace=true to look at the events"
        )

    def section(self) -> dict[str, Any]:
        """The section `profile` of run.json. Shares are of the seconds of all ranks together."""
        total = Seconds.total(window.seconds for window in self.ranks)
        steps, failure = self.ranks[0].steps, self.failure
        return {
            "status": "error" if failure else "ok",
            "reason": failure,
            "steps": steps,
            "lead_in_steps": self.lead_in,
            "events": "kernels and copies of the device" if self.on_device else "operators and collectives of the host",
            "spans": sorted({part for window in self.ranks for part in window.parts}),
            "window_s": total.window_s,
            "step_s": total.window_s / len(self.ranks) / steps,
            **({} if failure else total.shares()),
            "ranks": [window.line() for window in self.ranks],
        }


def profiled(run: Run, trainer: Trainer, steps: int) -> Window:
    """Train `steps` steps (fewer where an epoch has fewer) under the profiler, in the order of the next epoch's data.
    Every rank calls it."""
    device, most = run.job.device, run.feed.steps_per_epoch
    lead_in = min(LEAD_IN, most - 1)
    steps = min(steps, most - lead_in)
    batches = iter(run.feed.train(run.epochs))
    train_steps(run, trainer, batches, lead_in)
    idle(device)
    with Profiler(device) as profiler:
        barrier()  # a profiler takes longer to start on some ranks than on others
        with span(WINDOW):
            train_steps(run, trainer, batches, steps)
            trainer.flush()
            idle(device)
    on_device = device.type == "cuda"
    here = RankWindow.of(run.job, run.place, steps, profiler.events())
    run.boundary.heartbeat()
    return Window(all_gather(here), lead_in, on_device, profiler)


def train_steps(run: Run, trainer: Trainer, batches: Iterator[Batch | None], count: int) -> None:
    """The loop's steps without its clock, at the last learning rate."""
    for _ in range(count):
        with span(DATA):
            batch = next(batches)
        trainer.step(batch)
        run.boundary.heartbeat()
