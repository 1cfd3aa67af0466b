"""Every loader with every framework: ranks read what their place says, start no other reader, train and validate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.data.images.folders import ImageFolders
from tests.data.feeding import CASE, CLASSES, LOADERS, Fed, feed_all
from tests.support.libraries import needs_dali, why_no_horovod
from tests.support.pictures import write_folders
from tests.support.ranks import run_ranks

pytestmark = needs_dali
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


def test_every_framework_is_here() -> None:
    assert {words.split()[0] for all_words in LAYOUTS.values() for words in all_words} == set(EVERY)


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
