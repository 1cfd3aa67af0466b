"""Every loader with every framework: ranks read what their place says, start no other reader, train and validate."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.data.feed import Loader, Request
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.loaders.dali import Dali, DaliReader
from ddlbench.data.loaders.native import Native
from ddlbench.data.loaders.synthetic import Synthetic
from ddlbench.job import Batch, Framework, Job, Place, Trainer
from ddlbench.loop import Run, train
from ddlbench.measure.rows import EpochRow
from ddlbench.models.resnet import ResNet
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.recipe.recipe import Rates
from tests.support.equal import Rows, make_job
from tests.support.libraries import needs_dali, why_no_horovod
from tests.support.pictures import write_folders
from tests.support.ranks import run_ranks
from tests.support.reference import Case

pytestmark = needs_dali

CLASSES = 26  # and as many files a split: a label says which of them a sample is
PIXELS = 32
MODEL = ResNet("resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=PIXELS, num_classes=CLASSES)
CASE = Case("fed", MODEL, micro_batch=2, global_batch=8, lr=1e-3)
LOADERS: list[Any] = [Dali("dali"), Native("native", workers=1), Synthetic("synthetic")]


@dataclass
class Fed:
    """What one rank saw of one epoch.

    batches: (labels of the valid samples, digest of the images) a training batch; validated: labels of all those of
    validation; computed: digest of the images that reached the first layer in training, None on ranks without it;
    sources: DALI's pipelines built, or worker processes that read
    """

    place: Place
    row: EpochRow
    batches: list[tuple[list[int], str]]
    validated: list[int]
    delivered: str
    computed: str | None
    sources: int


def keeping(read: Callable[..., Iterator[Batch | None]], kept: list[Batch]) -> Callable[..., Iterator[Batch | None]]:
    """As `read`, but the batches that it gives are kept."""

    def through(*epoch: int) -> Iterator[Batch | None]:
        for batch in read(*epoch):
            if batch is not None:
                kept.append(batch)
            yield batch

    return through


def feed_all(frameworks: Sequence[Framework], data: ImageFolders) -> list[dict[str, Fed]]:
    """By framework and name of the loader."""
    return [feed_one(framework, data) for framework in frameworks]


def feed_one(framework: Framework, data: ImageFolders) -> dict[str, Fed]:
    job = make_job(CASE)
    framework.check(job)
    trainer = framework.setup(job)
    place = trainer.place
    result = {loader.name: one_epoch(trainer, job, place, loader, data) for loader in LOADERS}
    dist.barrier()
    trainer.close()
    return result


def one_epoch(trainer: Trainer, job: Job, place: Place, loader: Loader, data: ImageFolders) -> Fed:
    loader.check(data, MODEL, job.device)
    recorder, given, checked = Rows(), list[Batch](), list[Batch]()
    with first_layer() as computed, pipelines() as built:
        request = Request(MODEL, place, job.device, job.seed, job.replica_batch(place.data_size))
        feed: Any = loader.open(data, request)
        feed.train, feed.validation = keeping(feed.train, given), keeping(feed.validation, checked)
        run = Run(
            job, place, feed, epochs=1, warmup_steps=1, recorder=recorder, progress=Progress(False),
            boundary=Boundary(job.device),
        )  # fmt: skip
        train(run, trainer, Rates(CASE.rate))
        sources = len(built) + len(multiprocessing.active_children())
        feed.close()
    assert multiprocessing.active_children() == []
    return Fed(
        place,
        recorder.rows[0],
        [(labels(batch), digest([batch.inputs])) for batch in given],
        [label for batch in checked for label in labels(batch)],
        digest([batch.inputs for batch in given]),
        digest(computed) if computed else None,
        sources,
    )


def labels(batch: Batch) -> list[int]:
    return batch.targets[batch.valid].tolist()


def digest(images: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in images)).hexdigest()


@contextmanager
def first_layer() -> Iterator[list[Tensor]]:
    """What convolutions of whole images are given while gradients are wanted, micro batch by micro batch."""
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Conv2d) and inputs[0].shape[1:] == MODEL.input_shape() and torch.is_grad_enabled():
            seen.append(inputs[0].detach().clone())

    hook = register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def pipelines() -> Iterator[list[object]]:
    """DALI's, as they are built."""
    built: list[object] = []
    build = DaliReader.pipeline

    def counted(*args: Any) -> Any:
        built.append(build(*args))
        return built[-1]

    with patch.object(DaliReader, "pipeline", counted):
        yield built


STEPS, DROPPED = divmod(CLASSES, CASE.global_batch)

# A rank of `spatial` computes some rows of the images alone, and `megatron` trains text; their batches are shared as
# those of `tensor`.
LEFT_OUT = {"spatial", "megatron", *(["horovod"] if why_no_horovod() else [])}
EVERY = [name for name in choices("framework") if name not in LEFT_OUT]
QUICK = ["ddp", "zero1", "1f1b", "tensor"]
ON_A_V = {"zbv", "dualpipev"}  # rank 0 has the first and the last stage
LAYOUTS = {
    (1, "quick"): ["single"],
    (2, "quick"): QUICK,
    (2, "rest"): [
        *(name for name in EVERY if name not in ("single", "hybrid", *QUICK)),
        "hybrid framework.tp=2",
        "hybrid framework.dp=2 framework.sharded=true",
    ],
    (4, "rest"): [
        "hybrid framework.tp=2",
        "hybrid framework.dp=2 framework.tp=2",
        "hybrid framework.dp=2 framework.sharded=true",
        "tensor framework.dp=2",
        "tensor",
        "gpipe",
        "1f1b framework.dp=2",
        "interleaved framework.dp=2",
        "zero_bubble",
        "pipedream",
        "pipedream_2bw framework.dp=2",
        "fsdp framework.replicate=2",
    ],
}
PARAMETERS = [
    pytest.param(
        (world, part),
        words,
        id=f"{world}-ranks-{words}".replace(" framework.", "-"),
        marks=[] if part == "quick" else [pytest.mark.slow],
    )
    for (world, part), layouts in LAYOUTS.items()
    for words in layouts
]
everywhere = pytest.mark.parametrize(("group", "words"), PARAMETERS)

Given = list[dict[str, Fed]]  # by rank, by loader


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageFolders]:
    folder: Path = tmp_path_factory.mktemp("fed")
    data = write_folders(folder, train=1, val=1, classes=CLASSES)
    data.prepare()
    yield data
    train_all.cache_clear()


@cache
def train_all(group: tuple[int, str], root: str) -> dict[str, Given]:
    frameworks = [configuration("+model=resnet50", *on(words)).framework for words in LAYOUTS[group]]
    by_rank = run_ranks(group[0], feed_all, frameworks, ImageFolders("pictures", root=root))
    return dict(zip(LAYOUTS[group], (list(ranks) for ranks in zip(*by_rank, strict=True)), strict=True))


def on(words: str) -> list[str]:
    framework, *knobs = words.split()
    return [f"+framework={framework}", *knobs]


@pytest.fixture
def given(group: tuple[int, str], words: str, folders: ImageFolders) -> Given:
    return train_all(group, folders.root)[words]


def replicas(ranks: Given, loader: str) -> list[list[Fed]]:
    """The ranks of each replica that read."""
    every = [each[loader] for each in ranks]
    sizes = {fed.place.data_size for fed in every}
    assert len(sizes) == 1
    result = [
        [fed for fed in every if fed.place.data_rank == replica and fed.place.reads_data] for replica in range(*sizes)
    ]
    assert all(result), "nobody reads for a replica"
    return result


@everywhere
def test_all_train_and_validate_from_all_loaders(given: Given) -> None:
    for loader in LOADERS:
        (first, *_) = rows = [rank[loader.name].row for rank in given]
        assert first.steps == STEPS
        losses = [loss for rank in first.ranks for loss in rank.losses]
        assert len(losses) == STEPS * given[0][loader.name].place.data_size
        assert all(math.isfinite(loss) for loss in losses)
        for row in rows:
            assert row.metrics["val_samples"] == CLASSES
            assert math.isfinite(row.metrics["val_loss"])


@everywhere
def test_a_replica_s_ranks_read_the_same_bytes_and_compute_on_them(given: Given) -> None:
    for loader in LOADERS:
        read = {}
        for replica, (leader, *others) in enumerate(replicas(given, loader.name)):
            read[replica] = leader.delivered
            assert [fed.batches for fed in others] == [leader.batches] * len(others)
            assert [fed.validated for fed in others] == [leader.validated] * len(others)
        computing = [rank[loader.name] for rank in given if rank[loader.name].computed]
        assert {fed.place.data_rank for fed in computing} == set(read)
        assert [fed.computed for fed in computing] == [read[fed.place.data_rank] for fed in computing]
        assert len(set(read.values())) == len(read)


@everywhere
@pytest.mark.parametrize("loader", ["dali", "native"])
def test_an_epoch_visits_each_sample_once_over_all_replicas(given: Given, loader: str) -> None:
    leaders = [replica[0] for replica in replicas(given, loader)]
    trained = [label for leader in leaders for batch, _ in leader.batches for label in batch]
    assert len(trained) == len(set(trained)) == CLASSES - DROPPED
    assert sorted(label for leader in leaders for label in leader.validated) == list(range(CLASSES))


@everywhere
def test_dali_reads_the_native_order(given: Given) -> None:
    for rank in given:
        ours, theirs = ([labels for labels, _ in rank[loader].batches] for loader in ("dali", "native"))
        assert ours == theirs


@everywhere
def test_a_rank_that_does_not_read_starts_no_loader(given: Given) -> None:
    for rank in given:
        reads = rank["dali"].place.reads_data
        assert rank["dali"].sources == rank["native"].sources == (2 if reads else 0)  # training and validation
        assert rank["synthetic"].sources == 0
        assert all(bool(fed.batches) == reads for fed in rank.values())


@everywhere
def test_only_the_ends_of_a_pipeline_read_and_one_of_those_that_share_layers(given: Given, words: str) -> None:
    positions = [rank["dali"].place.coordinates for rank in given]
    last = 0 if words in ON_A_V else max(position.get("pp", 0) for position in positions)
    expected = [position.get("tp", 0) == 0 and position.get("pp", 0) in (0, last) for position in positions]
    assert [rank["dali"].place.reads_data for rank in given] == expected
