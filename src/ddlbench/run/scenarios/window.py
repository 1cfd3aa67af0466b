"""profile=true: a window of steps after the measured epochs, under torch's profiler.

The measured epochs are over and recorded when the window begins, so that it changes none of their numbers (ADR 16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddlbench.job import Batch, Trainer
from ddlbench.loop import Run
from ddlbench.measure.clock import idle
from ddlbench.measure.profiling.profile import RankWindow, Seconds
from ddlbench.measure.profiling.profiler import Profiler
from ddlbench.measure.profiling.spans import DATA, WINDOW, span
from ddlbench.ranks.control import all_gather, barrier

LEAD_IN = 2  # steps before the window: loader workers start, pipelines that stay full between steps fill


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
