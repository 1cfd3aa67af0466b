"""Train a case for some epochs with checkpoints, and continue it in other processes, with the package's own loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.config.checkpoint import Checkpoint
from ddlbench.config.schema import Config
from ddlbench.data.feed import Request
from ddlbench.job import Framework
from ddlbench.loop import Run, train
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from ddlbench.recipe.rates import Rates
from ddlbench.run.assembly import seed_replica
from ddlbench.run.checkpoints import check_checkpoints, open_checkpoints
from ddlbench.run.context import Attempt
from ddlbench.run.supervisor import Supervisor
from tests.support.equal import Rows, loader, make_job
from tests.support.reference import Case

EPOCHS, EVERY = 4, 2  # one checkpoint, in the middle


@dataclass(frozen=True)
class Training:
    """One training of a case. optimizer: its name; validate: after each epoch"""

    name: str
    case: Case
    framework: Framework
    optimizer: str = "sgd"
    validate: bool = True


@dataclass
class Course:
    """What a run and its continuation must share, epoch by epoch; weights on rank 0 alone.

    began_s, elapsed_s: before and after each epoch, as the record counts them
    """

    losses: dict[int, list[list[float]]] = field(default_factory=dict[int, list[list[float]]])
    rates: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    weights: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    updates: int = 0
    began_s: list[float] = field(default_factory=list[float])
    elapsed_s: list[float] = field(default_factory=list[float])
    notes: dict[str, Any] = field(default_factory=dict[str, Any])


class Notes:
    """What rank 0 would write into run.json."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}

    def add(self, **sections: Any) -> None:
        self.sections |= sections

    def save(self) -> None: ...

    def lines(self) -> list[dict[str, Any]]:
        return [{"epoch": 0}, {"epoch": 1}]

    def resume(self, resumed: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> None:
        self.sections["resume"] = {**resumed, "epochs": list(epochs)}


def train_all(trainings: Sequence[Training], folder: str, attempt: int) -> dict[str, Course]:
    """Each training; an attempt above 1 continues the one before."""
    linear, found = torch.nn.functional.linear, dict[str, Course]()
    for training in trainings:
        found[training.name] = train_one(training, Path(folder) / training.name, attempt)
        torch.nn.functional.linear = linear  # DeepSpeed's stage 3 leaves its own there, for all that follows
    return found


def train_one(training: Training, folder: Path, attempt: int) -> Course:
    case, rank, rows, notes = training.case, dist.get_rank(), Rows(), Notes()
    options = OptimizerConfig(training.optimizer, lr=case.lr, momentum=0.9, weight_decay=1e-4)
    job = make_job(case)
    object.__setattr__(job, "optimizer", partial(make_optimizer, options))
    own = Checkpoint(every=EVERY, resume=attempt > 1)
    config = cast(Config, SimpleNamespace(checkpoint=own, framework=training.framework, loader=loader()))
    check_checkpoints(config, job)
    training.framework.check(job)
    trainer = training.framework.setup(job)
    seed_replica(job, trainer.place)
    trainer.state()  # as the program does, for the hash of the first weights
    request = Request(case.model, trainer.place, job.device, job.seed, job.replica_batch(trainer.place.data_size))
    feed = loader().open(case.data, request)
    run = Run(
        job, trainer.place, feed, EPOCHS, 1, rows, Progress(False), Boundary(job.device), validate=training.validate
    )
    here = SimpleNamespace(
        config=config,
        launch=SimpleNamespace(rank=rank, world_size=dist.get_world_size()),
        record=notes if rank == 0 else None,
        folder=folder / f"attempt-{attempt}",
        run_id=training.name,
    )
    supervisor = SimpleNamespace(unlimited=nullcontext)
    rates = Rates(lambda step: case.lr / (step + 1))
    open_checkpoints(cast(Attempt, here), cast(Supervisor, supervisor), run, trainer, rates)
    train(run, trainer, rates)
    course = Course(updates=trainer.updates, weights=trainer.state() or {}, notes=notes.sections)
    for row in rows.rows:
        course.losses[row.epoch] = [list(each.losses) for each in row.ranks]
        course.rates[row.epoch] = [row.lr_last or 0.0]
        course.metrics[row.epoch] = {k: v for k, v in row.metrics.items() if k != "validation_time_s"}
        course.began_s.append(row.elapsed_s - row.epoch_time_s - row.metrics.get("validation_time_s", 0.0))
        course.elapsed_s.append(row.elapsed_s)
    feed.close()
    dist.barrier()
    trainer.close()
    return course
