"""What run/ asks of every loader."""

from __future__ import annotations

import pytest

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.data.feed import Loader

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
