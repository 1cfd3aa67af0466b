"""What an attempt does. mode=train: a framework trains the model. mode=loader: the loader alone.

With profile=true a window of steps under torch's profiler follows the training. The measured epochs are over and
recorded when the window begins, so that it changes none of their numbers (ADR 16).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ddlbench.config.schema import Config
from ddlbench.data.feed import Feed
from ddlbench.errors import RunError, Unsupported
from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks
from ddlbench.job import Batch, Job, Place, Trainer
from ddlbench.loop import Run, Scenario, train
from ddlbench.measure.clock import EpochClock, idle
from ddlbench.measure.devices.unknown import total
from ddlbench.measure.devices.usage import ReadBytes
from ddlbench.measure.profiling.profile import Profiler, RankWindow, Seconds
from ddlbench.measure.profiling.spans import DATA, WINDOW, span
from ddlbench.measure.rows import RankEpoch, gather_epoch
from ddlbench.ranks.control import all_gather, barrier, sum_over_ranks
from ddlbench.recipe.recipe import Rates, learning_rate
from ddlbench.record.run_json import ledger, model_section, training_ledger
from ddlbench.run.checkpoints import check_checkpoints

LEAD_IN = 2  # steps before the window, in addition to those that fill a pipeline: loader workers start
LAYOUTS = ("single", "ddp")  # of mode=loader


@dataclass
class Training(Scenario):
    config: Config
    job: Job
    trainer: Trainer = field(init=False)  # from `setup` to `close`
    rates: Rates = field(init=False)
    weights_hash: str | None = None  # of the initial model
    measured_facts: dict[str, Any] | None = None  # after the measured epochs, where steps follow that are not measured

    def check(self) -> None:
        self.config.framework.check(self.job)
        check_checkpoints(self.config, self.job)

    def setup(self) -> Place:
        self.trainer = self.config.framework.setup(self.job)
        return self.trainer.place

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
            section, profiler = profiled(run, self.trainer, self.measured_facts, self.config.profile_steps)
            run.recorder.window(section, profiler.save)
            if section["status"] == "error":
                raise RunError(section["reason"])

    def facts(self) -> dict[str, Any]:
        return self.trainer.facts() if self.measured_facts is None else self.measured_facts

    def ledger(self, run: Run, steps: int) -> dict[str, Any]:
        trained = training_ledger(run, self.trainer, self.rates, self.config.recipe, steps)
        return trained | {"weights_hash_start": self.weights_hash}

    def close(self) -> None:
        if hasattr(self, "trainer"):
            self.trainer.close()
            del self.trainer


def verdict(ranks: list[RankWindow], lead_in: int, on_device: bool, facts: Mapping[str, Any]) -> tuple[str, str | None]:
    """The status of a window, and its reason: "unknown" if the window does not show what training is, "error" if the
    shares cannot be right, because training on several ranks communicates on each of them, except by design.

    facts: those of the trainer. "communication": "none" if training sends nothing by design, "host" if it sends from
        the host's memory on GPUs too
    """
    steps, communication, (filling, period) = ranks[0].steps, facts.get("communication"), filling_and_period(facts)
    if lead_in < filling or steps < period:
        return "unknown", (
            f"profile=true: the shares are unknown, because the window has {steps} steps after {lead_in} "
            f"others, and needs {period} after {filling} (a period of the work, in a full pipeline): choose "
            f"profile_steps of at least {period}, and epochs of at least {period + filling} steps"
        )
    if on_device and len(ranks) > 1 and communication == "host":
        return "unknown", (
            "profile=true: the shares are unknown, because the framework communicates from the host's memory, "
            "which the profile of a GPU does not show: run on device=cpu to see them"
        )
    silent = [window.rank for window in ranks if not window.collectives]
    if silent and len(ranks) > 1 and communication != "none":
        return "error", (
            f"profile=true: no communication was seen on rank {silent[0]} of {len(ranks)} in {steps} steps, so its "
            "share is unknown, not 0 (the epochs before are measured): run again with profile=false, or with "
            "profile_trace=true to look at the events"
        )
    return "ok", None


def profile_section(ranks: list[RankWindow], lead_in: int, on_device: bool, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The section `profile` of run.json, the same on every rank. Shares are of the seconds of all ranks together. If
    they are not known, the columns of the tables are left out."""
    spent = Seconds.total(window.seconds for window in ranks)
    steps, (status, reason) = ranks[0].steps, verdict(ranks, lead_in, on_device, facts)
    seconds = {"window_s": spent.window_s, "step_s": spent.window_s / len(ranks) / steps}
    return {
        "status": status,
        "reason": reason,
        "steps": steps,
        "lead_in_steps": lead_in,
        "events": "kernels and copies of the device" if on_device else "operators and collectives of the host",
        "spans": sorted({part for window in ranks for part in window.parts}),
        **(seconds | spent.shares() if status == "ok" else {}),
        "ranks": [window.line() for window in ranks],
    }


def filling_and_period(facts: Mapping[str, Any]) -> tuple[int, int]:
    """Steps after which a pipeline that stays full between steps is full, 0 for other frameworks; and steps after which
    the work of a step repeats: some frameworks communicate in one of them alone."""
    return max(facts.get("staleness_theoretical") or [0]), facts.get("local_steps", 1)


def lengths(facts: Mapping[str, Any], steps: int, most: int) -> tuple[int, int]:
    """Steps of the lead-in, which also fills a pipeline, and of the window: at most `steps`, complete periods if one
    fits. most: steps of an epoch, which has both"""
    filling, period = filling_and_period(facts)
    lead_in = min(LEAD_IN + filling, max(most - period, 0))
    steps = min(steps, most - lead_in)
    return lead_in, steps // period * period or steps


def profiled(run: Run, trainer: Trainer, facts: Mapping[str, Any], steps: int) -> tuple[dict[str, Any], Profiler]:
    """Train at most `steps` steps under the profiler, in the order of the next epoch's data. Every rank calls it.
    Returns the section `profile` of run.json, and the profiler of this rank. facts: of the trainer"""
    device, batches = run.job.device, iter(run.feed.train(run.epochs))
    lead_in, steps = lengths(facts, steps, run.feed.steps_per_epoch)
    train_steps(run, trainer, batches, lead_in)
    idle(device)
    with Profiler(device) as profiler:
        barrier()  # a profiler takes longer to start on some ranks than on others
        with span(WINDOW):
            train_steps(run, trainer, batches, steps)
            idle(device)
        # It belongs to the end of an epoch. The profiler is still on, because messages in flight have begun under it.
        trainer.flush()
    on_device = device.type == "cuda"
    here = RankWindow.of(run.job, run.place, steps, profiler.events())
    run.boundary.heartbeat()
    return profile_section(all_gather(here), lead_in, on_device, facts), profiler


def train_steps(run: Run, trainer: Trainer, batches: Iterator[Batch | None], count: int) -> None:
    """The loop's steps without its clock, at the last learning rate."""
    for _ in range(count):
        with span(DATA):
            batch = next(batches)
        trainer.step(batch)
        run.boundary.heartbeat()


@dataclass
class Loading(Scenario):
    """Batches as in training, moved to the device; no model, no framework.

    A step is nothing but waiting for its batch, under the clock of training. The framework is not set up, so it cannot
    say which ranks read: every rank is a data rank, as in `single` and `ddp`, and other layouts are refused.
    """

    config: Config
    job: Job

    def check(self) -> None:
        """Raise Unsupported if not every rank would be a data rank."""
        framework = self.config.framework.name
        if framework not in LAYOUTS:
            raise Unsupported(
                f"mode=loader reads on every rank as {' and '.join(LAYOUTS)} do, not as {framework}: "
                "choose +framework=ddp"
            )
        self.config.framework.check(self.job)

    def setup(self) -> Place:
        return Place(self.job.rank, self.job.world_size, coordinates={"dp": self.job.rank})

    def begin(self, feed: Feed) -> dict[str, Any]:
        return model_section(self.config.model, None)

    def run(self, run: Run) -> None:
        """Every epoch: take its batches against the clock, reduce over ranks, read the validation samples, record."""
        for epoch in range(run.epochs):
            clock = run.begin(epoch)
            before = ReadBytes.now()
            batches = run.progress.steps(run.feed.train(epoch), run.feed.steps_per_epoch, f"epoch {epoch}")
            for _ in clock.steps(batches):
                run.boundary.pass_step(None)
            times = clock.stop()
            read = ReadBytes.now().since(before)
            run.boundary.require_finite()
            rank = RankEpoch.of(run.job, run.place, times, [], [], run.feed.facts()["bad_samples"])
            row = gather_epoch(epoch, run.epochs, rank, run.job.global_batch, updates=0)
            counted = self.config.loader.counts_reads and not self.config.data.mapped
            row.metrics = {"read_bytes": total(all_gather(read if counted else None))}
            run.record(row, partial(read_validation, run) if run.validate else dict)

    def ledger(self, run: Run, steps: int) -> dict[str, Any]:
        return ledger(run, steps)


def read_validation(run: Run) -> dict[str, Any]:
    """Every validation sample once, over all ranks: how many, and how long that took."""
    clock = EpochClock(run.job.device, barrier)
    samples = torch.zeros((), dtype=torch.float64, device=run.job.device)
    for batch in clock.steps(run.feed.validation()):
        assert batch is not None, "every rank reads"
        samples += batch.valid.sum()
        run.boundary.heartbeat()
    times = clock.stop()
    counted = run.validated({"val_samples": int(sum_over_ranks(samples))})
    return {**counted, "validation_time_s": times.epoch_s + times.straggler_s}
