"""No stream of a GPU reads or gets memory that another one still uses: frameworks with several streams."""

from __future__ import annotations

import pytest

from ddlbench.frameworks.deepspeed import adapter
from ddlbench.frameworks.shared.offloading import Saved
from tests.support.streams import races

SMALL = "framework.reduce_bucket_mb=0.01"  # 1,310 numbers: most matrices are larger
CASES = {
    "zero1": ("zero1", "gpt2_small"),
    "zero1-small-buckets": ("zero1", "gpt2_small", SMALL),
    "zero2": ("zero2", "gpt2_small"),
    "zero2-small-buckets": ("zero2", "gpt2_small", SMALL),
    "zero3": ("zero3", "gpt2_small", "framework.persistence_threshold=0"),
    "zero3-small-buckets": ("zero3", "gpt2_small", "framework.persistence_threshold=0", SMALL),
    "compressed-gradients": ("ddp", "gpt2_small", "framework.comm_hook=sign"),
    "offloaded-activations": ("ddp", "gpt2_small", "train.offload_activations=true"),
}


@pytest.mark.parametrize("name", CASES)
def test_streams_wait_for_each_other(name: str) -> None:
    found, streams = races(*CASES[name])
    assert streams > 1
    assert not found


def test_memory_that_is_freed_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "keep_until_reduced", lambda _: None)
    found, _ = races(*CASES["zero2-small-buckets"])
    assert any("may read memory that was freed" in text for text in found)


def test_a_stream_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saved, "wait", lambda _: None)
    found, _ = races(*CASES["offloaded-activations"])
    assert any("does not wait for" in text for text in found)
    assert any("may read memory that was freed" in text for text in found)
