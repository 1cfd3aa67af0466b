"""What run/ asks of every loader, and what all of them promise."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.data.feed import Loader
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.loaders.dali import Dali
from ddlbench.data.loaders.native import Native
from ddlbench.data.loaders.replica_feed import epoch_order
from ddlbench.data.loaders.synthetic import Synthetic
from ddlbench.errors import UserError
from ddlbench.job import Batch, Place
from tests.support.dali_feeds import levels, picture, request, write
from tests.support.libraries import needs_dali

# counts_reads, drops_cache, decodes_on_host, pinned, parallel_key, scored: a line for each loader
ANSWERS = {
    "dali": (False, False, False, None, "threads", True),
    "native": (True, True, True, True, "workers", True),
    "synthetic": (False, False, False, None, None, False),
}


def test_every_loader_is_listed() -> None:
    assert set(choices("loader")) == ANSWERS.keys()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_loader_answers_all_that_is_asked(name: str) -> None:
    loader = configuration("+framework=ddp", "+model=resnet50", f"loader={name}").loader
    assert isinstance(loader, Loader)
    answers = (
        loader.counts_reads, loader.drops_cache, loader.decodes_on_host, loader.pinned, loader.parallel_key,
        loader.scored,
    )  # fmt: skip
    assert answers == ANSWERS[name]
    assert {loader.parallel_key} <= {None, *vars(loader)}


EVERY = pytest.mark.parametrize(
    "loader",
    [
        Native("native", workers=0), Native("native", workers=2), Synthetic("synthetic"),
        pytest.param(Dali("dali"), marks=needs_dali),
    ],
    ids=["native", "native with workers", "synthetic", "dali"],
)  # fmt: skip


@EVERY
def test_the_global_random_stream_is_left_alone(folders: ImageFolders, loader: Any) -> None:
    torch.manual_seed(9)
    expected = torch.rand(2)
    torch.manual_seed(9)
    feed = loader.open(folders, request())
    assert len([*feed.train(0), *feed.validation()]) == 3 + 3
    feed.close()
    assert torch.equal(torch.rand(2), expected)


@EVERY
def test_a_rank_that_does_not_read_gets_none_for_each_batch(folders: ImageFolders, loader: Any) -> None:
    feed = loader.open(folders, replace(request(), place=Place(0, 1, reads_data=False)))
    assert [*feed.train(0), *feed.validation()] == [None] * 6
    assert multiprocessing.active_children() == []
    feed.close()


@EVERY
def test_channels_last_is_the_layout_of_the_images(folders: ImageFolders, loader: Any) -> None:
    feed = loader.open(folders, request(channels_last=True))
    (batch, *_) = feed.train(0)
    feed.close()
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)


@EVERY
def test_fewer_samples_than_a_global_batch_are_refused(folders: ImageFolders, loader: Any) -> None:
    with pytest.raises(UserError, match="15 training samples, fewer than one global batch of 16"):
        loader.open(folders, request(replica_batch=16))


STEP = 9  # levels of red between one plain image and the next
FILE_READERS = [Native("native", workers=0), pytest.param(Dali("dali"), marks=needs_dali)]
READER_NAMES = ["native", "dali"]
READERS = pytest.mark.parametrize("loader", FILE_READERS, ids=READER_NAMES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    """26 + 7 images of one color each: any crop shows which sample it is from."""
    images = [picture(np.full((40, 48, 3), index * STEP)) for index in range(26)]
    return write(tmp_path_factory.mktemp("plain"), images, images[:7])


def indices(batches: Iterable[Batch]) -> list[list[int]]:
    """[[index, ...] a batch] of the valid samples of `plain`."""
    return [(levels(batch.inputs[batch.valid])[:, 0].mean((1, 2)) / STEP).round().int().tolist() for batch in batches]


def ordered(seed: int, epoch: int, size: int = 4) -> list[list[int]]:
    """The global batches of an epoch of `plain`."""
    return epoch_order(26, seed, epoch)[: 26 // size * size].reshape(-1, size).tolist()


@READERS
def test_an_epoch_holds_every_sample_once_and_batches_stay_as_they_were_delivered(
    plain: ImageFolders, loader: Any
) -> None:
    feed = loader.open(plain, request())
    assert (feed.steps_per_epoch, feed.dropped_samples, feed.val_samples) == (6, 2, 7)
    for epoch in (0, 1):
        delivered = list(feed.train(epoch))
        assert indices(delivered) == ordered(0, epoch)
    assert indices(loader.open(plain, request(seed=1)).train(0)) == ordered(1, 0)


@READERS
@pytest.mark.parametrize("size", [2, 3, 4])
def test_replicas_take_contiguous_slices_of_each_global_batch_in_the_order_of_the_epoch(
    plain: ImageFolders, loader: Any, size: int
) -> None:
    """Of 26 samples those after the last complete global batch are dropped."""
    feeds = [loader.open(plain, request(rank, size, replica_batch=12 // size)) for rank in range(size)]
    shares = [indices(feed.train(1)) for feed in feeds]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == ordered(0, 1, size=12)


@READERS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_validation_sample_counts_once(plain: ImageFolders, loader: Any, size: int) -> None:
    feeds = [loader.open(plain, request(rank, size, replica_batch=2)) for rank in range(size)]
    batches = [list(feed.validation()) for feed in feeds]
    assert {len(each) for each in batches} == {{1: 4, 2: 2, 3: 2}[size]}
    assert all(batch.inputs.shape == (2, 3, 32, 32) for each in batches for batch in each)
    assert sorted(index for each in batches for batch in indices(each) for index in batch) == list(range(7))


@pytest.mark.parametrize("loader", [*FILE_READERS, Native("native", workers=1)], ids=[*READER_NAMES, "worker"])
def test_samples_that_a_replica_lacks_are_zeros_and_not_valid(plain: ImageFolders, loader: Any) -> None:
    """One sample for two replicas of two."""
    for rank, valid in enumerate(([True, False], [False, False])):
        feed = loader.open(replace(plain, val_limit=1), request(rank, 2, replica_batch=2))
        for _ in range(2):
            (batch,) = feed.validation()
            assert (batch.inputs.dtype, batch.inputs.shape) == (torch.float32, (2, 3, 32, 32))
            assert [bool(image.any()) for image in batch.inputs] == batch.valid.tolist() == valid
        feed.close()


@READERS
def test_an_epoch_left_in_the_middle_disturbs_none(plain: ImageFolders, loader: Any) -> None:
    feed = loader.open(plain, request())
    left = feed.train(0)
    next(left)
    assert indices(feed.train(1)) == ordered(0, 1)
    assert indices(feed.validation()) == [[0, 1, 2, 3], [4, 5, 6]]
    feed.close()
    assert indices(feed.train(0)) == ordered(0, 0)


@pytest.mark.parametrize(
    ("loader", "wrong", "message"),
    [
        (Dali, {"device": "tpu"}, "loader.device=tpu must be one of cpu, gpu, mixed, or null"),
        (Dali, {"threads": 0}, "loader.threads=0 must be 1 or more"),
        (Dali, {"prefetch": 0}, "loader.prefetch=0 must be 1 or more"),
        (Native, {"workers": -1}, "loader.workers=-1 must be 0 or more, or null"),
        (Native, {"prefetch": 0}, "loader.prefetch=0 must be 1 or more"),
    ],
)
def test_wrong_values_are_refused(loader: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loader("loader", **wrong)
