"""mode=loader: the loader alone. Batches as in training, moved to the device; no model, no framework.

A step is nothing but waiting for its batch, under the clock of training. The framework is not set up, so it cannot say
which ranks read: every rank is a data rank, as in `single` and `ddp`, and other layouts are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ddlbench.config.schema import Config
from ddlbench.data.feed import Feed
from ddlbench.errors import Unsupported
from ddlbench.job import Job, Place
from ddlbench.loop import Run, Scenario
from ddlbench.measure.clock import EpochClock
from ddlbench.measure.devices.memory import reset_peaks
from ddlbench.measure.devices.unknown import total
from ddlbench.measure.devices.usage import ReadBytes
from ddlbench.measure.rows import RankEpoch, gather_epoch
from ddlbench.ranks.control import all_gather, barrier, sum_over_ranks
from ddlbench.record.run_json import ledger, model_section

LAYOUTS = ("single", "ddp")


@dataclass
class Loading(Scenario):
    config: Config
    job: Job

    def check(self) -> None:
        """Raise Unsupported where not every rank would be a data rank."""
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
            run.boundary.begin(epoch, run.feed.steps_per_epoch)
            clock = run.clock = EpochClock(run.job.device, barrier, run.warmup(epoch), run.meter)
            reset_peaks(run.job.device)
            before = ReadBytes.now()
            batches = run.progress.steps(run.feed.train(epoch), run.feed.steps_per_epoch, f"epoch {epoch}")
            for _ in clock.steps(batches):
                run.boundary.pass_step(None)
            times = clock.stop()
            read = ReadBytes.now().since(before)
            run.boundary.end()
            rank = RankEpoch.of(run.job, run.place, times, [], [], run.feed.facts()["bad_samples"])
            row = gather_epoch(epoch, run.epochs, rank, run.job.global_batch, updates=0)
            counted = self.config.loader.counts_reads and not self.config.data.mapped
            row.metrics = {"read_bytes": total(all_gather(read if counted else None))}
            row.metrics |= read_validation(run) if run.validate else {}
            run.record(row)

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
