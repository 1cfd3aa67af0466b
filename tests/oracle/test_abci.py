"""Weak scaling on the V100 cluster of Kahira et al. 2021 to 1,024 GPUs, against sums by hand with its alpha and beta.

NVLink 20 us and 50 GB/s, network 0.5 us and 12.5 GB/s, four GPUs a node: 1,024 GPUs are 256 nodes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ddlbench.config.compose import configuration
from ddlbench.oracle.machine.collectives import path, ring_all_reduce, tree_all_reduce
from ddlbench.oracle.measured.inputs import OneStep
from ddlbench.oracle.predictor import Prediction
from tests.oracle.made import ABCI, by_one_step

# torchvision's documentation: parameters of resnet50 and vgg16; 4 bytes each.
BYTES = {"resnet50": 4 * 25_557_032, "vgg16": 4 * 138_357_544}
SAMPLES = {"resnet50": 64, "vgg16": 32}  # a GPU, section 3 of the paper
STEP_S = 0.2
LABELS = ["ResNet-50", "ResNet-50, one message in a ring", "VGG-16", "VGG-16, one message in a ring"]


@cache
def predicted(model: str, gpus: int, algorithm: str, *more: str) -> Prediction:
    words = ("+framework=ddp", f"+model={model}", f"train.batch_per_gpu={SAMPLES[model]}", *more)
    return by_one_step(configuration(*words), gpus, replace(ABCI, algorithm=algorithm), OneStep(STEP_S))


@pytest.mark.parametrize("model", BYTES)
def test_weak_scaling_keeps_the_seconds_of_one_gpu_and_adds_the_all_reduce(model: str) -> None:
    """The paper's oracle stacks computing and communication."""
    row = predicted(model, 1024, "auto")
    assert row.compute_s == pytest.approx(STEP_S * ABCI.slowest(1024))
    assert row.comm_hidden_s == pytest.approx(0)
    assert row.step_s == pytest.approx(STEP_S * ABCI.slowest(1024) + (row.comm_exposed_s or 0))
    assert sum(message["bytes_"] for message in row.messages) == BYTES[model]
    assert row.marks == ()


def test_a_ring_starts_on_every_link_and_its_bytes_take_as_long_as_the_slowest_one() -> None:
    """A piece crosses 2,046 links of 1,024 GPUs on 256 nodes: 510 between nodes, 1,536 within them."""
    seconds = ring_all_reduce(BYTES["resnet50"], path(ABCI, 1024))
    assert seconds == pytest.approx(1536 * 20e-6 + 510 * 0.5e-6 + 2046 / 1024 * BYTES["resnet50"] / 12.5e9)
    assert seconds == pytest.approx(0.0473, rel=1e-3)
    assert ring_all_reduce(4e9, path(ABCI, 4)) == pytest.approx(6 * 20e-6 + 6 / 4 * 4e9 / 50e9)


@pytest.mark.parametrize(("model", "tree_s"), [("resnet50", 0.01648), ("vgg16", 0.08868)])
def test_at_1024_gpus_a_tree_is_the_fastest_and_hardly_starts(model: str, tree_s: float) -> None:
    """Two ways of 3 hops within and log2(256) = 8 between nodes: 2 (60 us + 4 us); every byte twice at 12.5 GB/s."""
    seconds = path(ABCI, 1024).seconds("all_reduce", BYTES[model])
    assert seconds == pytest.approx(2 * (3 * 20e-6 + 8 * 0.5e-6) + 2 * BYTES[model] / 12.5e9)
    assert seconds == pytest.approx(tree_s, rel=1e-3)


def test_between_two_nodes_a_tree_sends_each_byte_once() -> None:
    """NCCL's all-reduce of 1 GB over 100 Gbit/s took 134 ms, and 268 ms in a ring (nccl-tests, issue 22). A byte takes
    1/12.5e9 s between the nodes, and less within them: twice 1/50e9 s."""
    assert path(ABCI, 8).seconds("all_reduce", 1e9) == pytest.approx(2 * (3 * 20e-6 + 0.5e-6) + 1e9 / 12.5e9)
    assert ring_all_reduce(1e9, path(ABCI, 8)) > 1.7 * tree_all_reduce(1e9, path(ABCI, 8))
    assert path(ABCI, 8).seconds("broadcast", 1e9) == pytest.approx(3 * 20e-6 + 0.5e-6 + 1e9 / 12.5e9)


def milliseconds(label: str) -> list[str]:
    """The milliseconds of a row of docs/oracle.md, predicted again."""
    name, _, ring = label.partition(", ")
    how = ("ring", "framework.bucket_cap_mb=1000") if ring else ("auto",)
    model = {"ResNet-50": "resnet50", "VGG-16": "vgg16"}[name]
    result = [predicted(model, gpus, *how).comm_exposed_s for gpus in (16, 64, 256, 1024)]
    return [f"{1e3 * (seconds or 0.0):.1f}" for seconds in result]


def test_the_page_has_what_weak_scaling_adds() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "oracle.md").read_text().partition("| more than one GPU's step |")[2]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines.splitlines()[2:6]]
    assert [label for label, *_ in rows] == LABELS
    for label, *cells in rows:
        assert cells == milliseconds(label), label


@pytest.mark.parametrize("gpus", [16, 64, 256, 1024])
def test_a_step_pays_for_every_bucket(gpus: int) -> None:
    """DDP sends 102 MB in buckets, each with start-ups of its own: more than one message, and less than that many."""
    row = predicted("resnet50", gpus, "auto")
    (message,) = row.messages
    to, start = path(ABCI, gpus), 2 * (3 * 20e-6 + 8 * 0.5e-6)
    sent_s = message["seconds"] - 2 * BYTES["resnet50"] / 900e9  # less the copies into messages
    once, in_tree = to.seconds("all_reduce", BYTES["resnet50"]), tree_all_reduce(BYTES["resnet50"], to)
    assert once < sent_s < in_tree + message["count"] * start
