"""Predictions with offloaded activations: exposed copies by hand, and the bytes of a rehearsal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ddlbench.config.compose import configuration
from ddlbench.counts.counts import Line
from ddlbench.errors import Unsupported
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.single import Single
from ddlbench.oracle.bands import worst_error
from ddlbench.oracle.predictor import strategy
from ddlbench.oracle.setting import Outcome
from ddlbench.oracle.strategies.data_parallel import HOST_COPIES
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.rehearse import rehearse
from tests.oracle.made import MACHINE, block, by_roofline, made
from tests.support.rehearsals import MODELS

HERE = replace(MACHINE, device=replace(MACHINE.device, host_bytes_per_s=10.0))
# Seconds of a sample forward and backward; 50 bytes of casts of weights, and 100 a sample.
BLOCKS = [replace(block(name, 5, 12), saved=Line(50.0, 100.0)) for name in "abc"]


def outcome(framework: Any = None, machine: Any = HERE, world: int = 1, **keys: Any) -> Outcome:
    keys = {"offload_activations": ["a"], "micro_batch": 2, **keys}
    return strategy(framework or Single(), made(world, BLOCKS, 8, machine, **keys))


def test_exposed_copies_by_hand() -> None:
    """Four micro batches of two samples. 200 bytes take 20 s each way: 10 s are hidden behind the next block's forward
    pass, and 24 s of backward pass hide all of the way back."""
    one = outcome()
    (copies,) = one.messages
    assert (copies.what, copies.count, copies.bytes_, copies.seconds) == (HOST_COPIES, 8, 1600, 160)
    assert copies.exposed == 4 * 10
    assert one.step_s == 4 * 2 * 3 * (5 + 12) + 40
    assert outcome(offload_activations=True).exposed_s == 4 * 20
    fast = replace(HERE, device=replace(HERE.device, host_bytes_per_s=20.0))
    assert outcome(machine=fast).exposed_s == 0
    slow = replace(HERE, device=replace(HERE.device, host_bytes_per_s=5.0))
    assert outcome(machine=slow).exposed_s == 4 * (30 + 16)


def test_a_second_run_hides_copies() -> None:
    slow = replace(HERE, device=replace(HERE.device, host_bytes_per_s=5.0))
    assert outcome(machine=slow, checkpoint_activations=["b"]).exposed_s == 4 * (30 + 6)


def test_a_measured_step_contains_its_copies() -> None:
    setting = made(1, BLOCKS, 8, HERE, offload_activations=["a"], micro_batch=2)
    measured = replace(setting.computation, samples=2.0)
    assert strategy(Single(), replace(setting, computation=measured)).exposed_s == 0


def test_an_unknown_link_and_traced_frameworks_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"cluster made: .* give device\.host_bytes_per_s in a cluster file"):
        outcome(machine=MACHINE)
    with pytest.raises(Unsupported, match="no model of offloaded activations with a framework that is traced"):
        outcome(DDP(comm_hook="topk"), world=2)


@pytest.mark.parametrize(
    ("framework", "model", "keys"),
    [
        ("single", "vgg16", ()),
        ("ddp", "gpt2_small", ()),
        ("ddp", "resnet50", ("train.precision=bf16",)),
        ("ddp", "gpt2_small", ("train.checkpoint_activations=[h1]",)),
        pytest.param("fsdp", "gpt2_small", (), marks=pytest.mark.slow),
        pytest.param("zero2", "vgg16", (), marks=pytest.mark.slow),
    ],
)
def test_bytes_on_the_device_are_those_of_a_rehearsal(framework: str, model: str, keys: tuple[str, ...]) -> None:
    """Within the error of the framework's formula, and less than without."""
    ranks = 1 if framework == "single" else 2
    words = (f"+framework={framework}", f"+model={model}", *MODELS[model], "train.batch_per_gpu=16", *keys)
    peaks = list[float]()
    for offload in ("none", "blocks"):
        config = configuration(*words, "train.micro_batch=8", f"train.offload_activations={offload}")
        row = by_roofline(config, ranks)
        rank = rehearse(config, Launch("torchrun", 0, ranks, 0, ranks), torch.device("cuda", 0))
        assert rank.error is None
        assert rank.memory is not None
        peaks.append(float(rank.memory["peak"] or 0))
        assert row.memory_bytes == pytest.approx(peaks[-1], rel=worst_error(framework))
        assert not rank.host_waits or framework == "zero2"  # its own
    assert peaks[1] < peaks[0]
