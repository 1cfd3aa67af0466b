"""mode=loader: the loader alone. Batches as in training, moved to the device; no model, no framework.

A step is nothing but waiting for its batch, under the clock of training. Where the ranks stand cannot be asked of a
framework that is not set up: every rank is a data rank, as in `single` and `ddp`, and other layouts are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from ddlbench.config.schema import Config
from ddlbench.errors import Unsupported
from ddlbench.job import Job, Place
from ddlbench.loop import Run
from ddlbench.measure.clock import EpochClock
from ddlbench.measure.memory import reset_peaks
from ddlbench.measure.rows import RankEpoch, gather_epoch
from ddlbench.measure.usage import Usage
from ddlbench.ranks.control import barrier, everyones, total

LAYOUTS = ("single", "ddp")


def check(config: Config) -> None:
    """Raise Unsupported where not every rank would be a data rank."""
    framework = config.framework.name
    if framework not in LAYOUTS:
        raise Unsupported(
            f"mode=loader reads on every rank as {' and '.join(LAYOUTS)} do, not as {framework}: choose +framework=ddp"
        )


def every_rank(job: Job) -> Place:
    """The place of a rank that is a data rank, as all others are."""
    return Place(job.rank, job.world_size, coordinates={"dp": job.rank})


def asks(config: Config) -> bool:
    """Whether the kernel sees what is read: DALI too maps what it opens."""
    return not config.data.mapped and config.loader.name != "dali"


def load(run: Run, counted: bool) -> None:
    """Every epoch: take its batches against the clock, reduce over ranks, read the validation samples, record.

    counted: whether the bytes read can be known
    """
    for epoch in range(run.epochs):
        clock = EpochClock(run.job.device, barrier, run.warmup(epoch))
        reset_peaks(run.job.device)
        before = Usage.now()
        for _ in clock.steps(run.progress.steps(run.feed.train(epoch), run.feed.steps_per_epoch, f"epoch {epoch}")):
            run.alive()
        times = clock.stop()
        used = Usage.now().since(before)
        rank = RankEpoch.of(run.job, run.place, times, [], [])
        row = gather_epoch(epoch, run.epochs, rank, run.job.global_batch, updates=0)
        row.metrics = {**over_ranks(used, counted), **(read_validation(run) if run.validate else {})}
        run.record(row)


def over_ranks(used: Usage, counted: bool) -> dict[str, Any]:
    """CPU seconds and bytes of all ranks together."""
    all_used = everyones(used)
    read = [usage.read_bytes for usage in all_used if usage.read_bytes is not None]
    known = counted and len(read) == len(all_used)
    return {"cpu_time_s": sum(usage.cpu_s for usage in all_used), "read_bytes": sum(read) if known else None}


def read_validation(run: Run) -> dict[str, Any]:
    """Every validation sample once, over all ranks: how many, and how long that took."""
    clock = EpochClock(run.job.device, barrier)
    samples = torch.zeros((), dtype=torch.float64, device=run.job.device)
    for batch in clock.steps(run.feed.validation()):
        assert batch is not None, "every rank reads"
        samples += batch.valid.sum()
        run.alive()
    times = clock.stop()
    return {"val_samples": int(total(samples)), "validation_time_s": times.epoch_s + times.straggler_s}
