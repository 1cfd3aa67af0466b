"""What run/ asks of every loader, and what all of them promise."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from typing import Any

import pytest
import torch

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.data.feed import Loader
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.loaders.dali import Dali
from ddlbench.data.loaders.native import Native
from ddlbench.data.loaders.synthetic import Synthetic
from ddlbench.errors import UserError
from ddlbench.job import Place
from tests.support.dali_feeds import request
from tests.support.libraries import needs_dali
from tests.support.pictures import write_folders

# counts_reads, drops_cache, decodes_on_host, pinned, parallel_key, scored, ahead (of two threads or processes): a line
# for each loader
ANSWERS = {
    "dali": (False, False, False, None, "threads", True, 2),
    "native": (True, True, True, True, "workers", True, 4),
    "synthetic": (True, False, False, None, None, False, 0),
}


def test_every_loader_is_listed() -> None:
    assert set(choices("loader")) == ANSWERS.keys()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_loader_answers_all_that_is_asked(name: str) -> None:
    two = [f"loader.{key}=2"] if (key := ANSWERS[name][4]) else []
    loader = configuration("+framework=ddp", "+model=resnet50", f"loader={name}", *two).loader
    assert isinstance(loader, Loader)
    answers = (
        loader.counts_reads, loader.drops_cache, loader.decodes_on_host, loader.pinned, loader.parallel_key,
        loader.scored, loader.ahead,
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    """15 training images and 9 of validation: 3 batches of 4 of each."""
    return write_folders(tmp_path_factory.mktemp("loaders"), train=5, val=3)


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
def test_fewer_samples_than_a_global_batch_are_refused(folders: ImageFolders, loader: Any) -> None:
    with pytest.raises(UserError, match="15 training samples, fewer than one global batch of 16"):
        loader.open(folders, request(replica_batch=16))


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
