"""Three real ranks, of which one is slow: the columns that name it, and those that cannot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ddlbench.data.feed import Feed, Request
from ddlbench.data.loaders.native import Native
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.job import Batch, Framework, Job
from ddlbench.loop import Run, train
from ddlbench.measure.devices.meter import Meter
from ddlbench.measure.rows import EpochRow
from ddlbench.measure.summary import summarize
from ddlbench.models.resnet import ResNet
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.recipe.recipe import Rates
from tests.support.busy import compute, needs_thread_seconds
from tests.support.equal import Rows, make_job
from tests.support.libraries import needs_horovod, why_no_horovod
from tests.support.ranks import run_ranks
from tests.support.reference import Case

WORLD, SLOW, STEPS = 3, 1, 3
STALL_S, BUSY_S = 0.1, 0.3
MODEL = ResNet("resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=32, num_classes=5)
CASE = Case("slow", MODEL, global_batch=6, steps=STEPS, val_samples=7)
# Horovod's ranks wait for each other without sleeping.
HOROVOD: dict[str, Framework] = {"horovod": Horovod()} if why_no_horovod() is None else {}
FRAMEWORKS: dict[str, Framework] = {"ddp": DDP(), "fsdp": FSDP(), **HOROVOD}


@dataclass
class Stalling:
    """A feed whose batches come late on one rank."""

    feed: Feed
    stall_s: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def train(self, epoch: int) -> Iterator[Batch | None]:
        for batch in self.feed.train(epoch):
            time.sleep(self.stall_s)
            yield batch


def slowed(job: Job) -> Job:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        compute(BUSY_S)
        return job.loss(output, targets)

    return replace(job, loss=loss)


def work() -> dict[str, tuple[EpochRow, dict[str, Any]]]:
    """The row of one epoch and, on rank 0, its summary, for each framework and a stalling loader."""
    rank = torch.distributed.get_rank()
    result: dict[str, Any] = {}
    for name, framework, stall_s in (
        *((name, each, 0.0) for name, each in FRAMEWORKS.items()),
        ("stall", DDP(), STALL_S),
    ):
        late = rank == SLOW
        job = make_job(CASE)
        job = slowed(job) if late and not stall_s else job
        trainer = framework.setup(job)
        request = Request(MODEL, trainer.place, job.device, job.seed, job.replica_batch(WORLD))
        feed = cast(Feed, Stalling(Native("native", workers=0).open(CASE.data, request), stall_s if late else 0.0))
        rows = Rows()
        run = Run(
            job, trainer.place, feed, 1, 1, rows, Progress(False), Boundary(job.device), validate=False,
            meter=Meter(job.device, leader=rank == 0),
        )  # fmt: skip
        train(run, trainer, Rates(lambda _: 0.01))
        row = rows.rows[0]
        result[name] = row, summarize([row], WORLD, None) if rank == 0 else {}
        trainer.close()
    return result


@cache
def of_rank_0() -> dict[str, tuple[EpochRow, dict[str, Any]]]:
    return run_ranks(WORLD, work)[0]


@needs_thread_seconds
@pytest.mark.parametrize("framework", ["ddp", "fsdp", pytest.param("horovod", marks=needs_horovod)])
def test_the_slow_rank_is_named_though_all_end_their_steps_together(framework: str) -> None:
    row, summary = of_rank_0()[framework]
    assert all(sum(rank.times.step_s) >= BUSY_S * STEPS for rank in row.ranks)  # every rank is equally late
    assert summary["straggler_rank"] == SLOW
    assert summary["straggler_host"] == row.ranks[SLOW].host != ""
    assert summary["own_step_source"] == "thread"
    assert summary["own_step_s"] >= BUSY_S
    assert summary["own_step_s"] == row.own_steps[SLOW].seconds


def test_a_stall_of_the_loader_is_data_wait_and_no_slow_rank() -> None:
    row, summary = of_rank_0()["stall"]
    assert min(row.ranks[SLOW].times.wait_s) >= STALL_S
    measured = row.ranks[SLOW].times.measured_s
    assert summary["data_wait_share"] * measured >= STALL_S * (STEPS - 1) * 0.99
    assert row.host_wait_share * row.measured_time_s >= STALL_S * (STEPS - 1) * 0.99
