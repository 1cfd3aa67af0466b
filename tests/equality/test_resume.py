"""A run that continues from a checkpoint, in other processes, trains bit for bit as one that was not interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.config.keys import Checkpoint
from ddlbench.config.schema import Config
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.job import Framework
from ddlbench.loop import Run, train
from ddlbench.measure.rows import EpochRow
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.recipe.recipe import Rates
from ddlbench.run.attempt import seed_replica
from ddlbench.run.checkpoints import check_checkpoints, open_checkpoints
from ddlbench.run.context import Attempt
from ddlbench.run.supervisor import Supervisor
from tests.equality.cases import MODELS
from tests.support.equal import Rows, feed_of, loader, make_job
from tests.support.ranks import run_ranks
from tests.support.reference import Case
from tests.support.strategies import strategies

EPOCHS, EVERY = 4, 2  # one checkpoint, in the middle
GPT2 = replace(MODELS["gpt2"], dropout=0.1)  # pyright: ignore  # resumed where its random numbers were
WIDER = replace(GPT2, n_embd=64)  # pyright: ignore  # half of a matrix has moments in 8 bits
QUICK = {"gpt2-ddp", "gpt2-ddp-powersgd", "resnet-ddp", "resnet-fsdp", "gpt2-gpipe", "gpt2-fsdp-8bit", "gpt2-ddp-lamb"}


@dataclass(frozen=True)
class Training:
    """One training of a case. validate: after each epoch"""

    name: str
    case: Case
    framework: Framework
    validate: bool = True


@dataclass
class Course:
    """What a run and its continuation must share; weights on rank 0 alone, notes are what it would write."""

    rows: list[EpochRow]
    weights: dict[str, Tensor]
    updates: int
    notes: dict[str, Any]


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
    linear, results = torch.nn.functional.linear, dict[str, Course]()
    for training in trainings:
        results[training.name] = train_one(training, Path(folder) / training.name, attempt)
        torch.nn.functional.linear = linear  # DeepSpeed's stage 3 leaves its own there, for all that follows
    return results


def train_one(training: Training, folder: Path, attempt: int) -> Course:
    case, rank, rows, notes = training.case, dist.get_rank(), Rows(), Notes()
    job = make_job(case)
    own = Checkpoint(every=EVERY, resume=attempt > 1)
    config = cast(Config, SimpleNamespace(checkpoint=own, framework=training.framework, loader=loader()))
    check_checkpoints(config, job)
    training.framework.check(job)
    trainer = training.framework.setup(job)
    seed_replica(job, trainer.place)
    trainer.state()  # as the program does, for the hash of the first weights
    feed = feed_of(case, job, trainer.place)
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
    course = Course(rows.rows, trainer.state() or {}, trainer.updates, notes.sections)
    feed.close()
    dist.barrier()
    trainer.close()
    return course


def trainings(world: int) -> Iterator[Training]:
    """AdamW and dropout for text, momentum and BatchNorm for images; every framework of the equality tests that may
    continue: stages that are balanced by seconds may not."""
    text = Case("gpt2-resumed-whole", GPT2, global_batch=6 * world, steps=3, lr=0.02, optimizer="adamw")
    images = Case("resnet-resumed-whole", MODELS["resnet"], global_batch=6 * world, steps=3, lr=1e-3)
    for case in (text, images):
        for strategy in strategies(world, case):
            if not getattr(strategy.framework, "by_seconds", False):
                yield Training(f"{case.model.name}-{strategy.name}", case, strategy.framework)
    untied = replace(text, model=replace(GPT2, tie_weights=False))  # pyright: ignore
    yield Training("gpt2-local_sgd", text, LocalSGD(local_steps=2))
    if world == 1:  # with several ranks the order of their gradients is not the same twice
        yield Training("gpt2-parameter_server-bound", text, ParameterServer(bound=2))
    yield Training("gpt2-pipedream", untied, PipeDream())
    for correction in ("prediction", "pipemare"):
        yield Training(f"gpt2-pipedream-{correction}", untied, PipeDream(correction=correction))
    yield Training("gpt2-pipedream_2bw", text, PipeDream(double_buffered=True))
    yield Training("resnet-local_sgd", images, LocalSGD(local_steps=2))
    # Without validation replicas keep their own running statistics from epoch to epoch.
    yield Training("resnet-ddp-without-validation", images, DDP(), validate=False)
    for framework in (DDP(), FSDP()):
        wider = replace(text, model=WIDER, lr=0.001, optimizer="adamw8bit")
        yield Training(f"gpt2-{framework.name}-8bit", wider, framework)
    # It counts its updates outside the states of its parameters.
    yield Training("gpt2-ddp-lamb", replace(text, optimizer="lamb"), DDP())
    # What hooks keep; PowerSGD begins before the checkpoint, and in the first step after it.
    for hook in ("topk", "sign", "int8", "powersgd"):
        yield Training(f"gpt2-ddp-{hook}", text, DDP(comm_hook=hook, powersgd_start_step=2, bucket_cap_mb=0.01))
    late = DDP(comm_hook="powersgd", powersgd_start_step=3 * EVERY, bucket_cap_mb=0.01)
    yield Training("gpt2-ddp-powersgd-late", text, late)
    if world == 2:
        # All of its parameters are persistent: the first forward pass gathers them, as in a new process, because what
        # runs again gathers them too, and may do no other operations.
        again = replace(text, checkpoint_activations="selective")
        yield Training("gpt2-zero3-persistent-selective", again, DeepSpeed(zero_stage=3))
    yield Training("gpt2-ddp-fp16", replace(text, precision="fp16", clip_norm=0.5), DDP())


def wanted(world: int, quick: bool) -> list[Training]:
    return [each for each in trainings(world) if (each.name in QUICK and world == 2) == quick]


@cache
def courses(world: int, quick: bool) -> tuple[list[dict[str, Course]], list[dict[str, Course]]]:
    """By rank: the uninterrupted trainings, which leave checkpoints, and in new processes the continued ones."""
    chosen = wanted(world, quick)
    with TemporaryDirectory() as folder:
        whole = run_ranks(world, train_all, chosen, folder, 1)
        left = {path.relative_to(folder).as_posix() for path in Path(folder).glob("*/checkpoints-1/*")}
        assert left == {f"{each.name}/checkpoints-1/epoch-{EVERY:06}" for each in chosen}
        return whole, run_ranks(world, train_all, chosen, folder, 2)


TRAININGS = [
    pytest.param(world, quick, each.name, id=f"{world}-ranks-{each.name}", marks=[] if quick else [pytest.mark.slow])
    for world in (1, 2)
    for quick in (True, False)
    for each in wanted(world, quick)
]


def comparable(row: EpochRow) -> tuple[object, ...]:
    metrics = {name: value for name, value in row.metrics.items() if name != "validation_time_s"}
    return row.epoch, [list(rank.losses) for rank in row.ranks], row.lr_last, metrics


@pytest.mark.parametrize(("world", "quick", "name"), TRAININGS)
def test_a_resumed_run_equals_an_uninterrupted_one(world: int, quick: bool, name: str) -> None:
    for whole, resumed in zip(*([each[name] for each in ranks] for ranks in courses(world, quick)), strict=True):
        assert [row.epoch for row in resumed.rows] == list(range(EVERY, EPOCHS))  # no epoch is trained twice
        assert list(map(comparable, resumed.rows)) == list(map(comparable, whole.rows[EVERY:]))
        assert resumed.updates == whole.updates == EPOCHS * 3
        assert resumed.weights.keys() == whole.weights.keys()
        assert all(torch.equal(tensor, whole.weights[key]) for key, tensor in resumed.weights.items())


def test_what_the_record_says_of_it() -> None:
    whole, resumed = (ranks[0]["gpt2-ddp"] for ranks in courses(2, True))
    saved = whole.notes["checkpoints"]
    assert saved["count"] == len(saved["seconds"]) == 1
    assert saved["median_s"] == saved["seconds"][0] > 0
    weights = sum(tensor.numel() * tensor.element_size() for tensor in whole.weights.values())
    tied = whole.weights["head.weight"].numel() * 4 if "head.weight" in whole.weights else 0
    assert saved["bytes"] > 3 * (weights - tied)  # weights and AdamW's two moments, once though there are two ranks
    assert saved["bytes"] < 2 * 3 * weights
    result = resumed.notes["resume"]
    assert (result["attempt"], result["epoch"], result["updates"]) == (1, EVERY, EVERY * 3)
    assert result["epochs"] == [{"epoch": 0}, {"epoch": 1}]
    assert result["seconds"] > 0
    assert "checkpoints" not in resumed.notes  # nothing follows the last epoch


def test_seconds_go_on_where_they_were() -> None:
    whole, resumed = (ranks[0]["gpt2-ddp"].rows for ranks in courses(2, True))
    began = [row.elapsed_s - row.epoch_time_s - row.metrics.get("validation_time_s", 0.0) for row in resumed]
    assert began[0] == pytest.approx(whole[EVERY - 1].elapsed_s)
    assert began[1] == pytest.approx(resumed[0].elapsed_s)
