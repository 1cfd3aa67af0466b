"""A run that continues from a checkpoint, in other processes, trains bit for bit as one that was not interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from tests.equality.cases import MODELS
from tests.support.ranks import run_ranks
from tests.support.reference import Case
from tests.support.resuming import EPOCHS, EVERY, Course, Training, train_all
from tests.support.strategies import strategies

GPT2 = replace(MODELS["gpt2"], dropout=0.1)  # pyright: ignore  # resumed where its random numbers were
QUICK = {"gpt2-ddp", "resnet-ddp", "resnet-fsdp", "gpt2-gpipe"}


def trainings(world: int) -> Iterator[Training]:
    """AdamW and dropout for text, momentum and BatchNorm for images; every framework of the equality tests."""
    text = Case("gpt2-resumed-whole", GPT2, global_batch=6 * world, steps=3, lr=0.02)
    images = Case("resnet-resumed-whole", MODELS["resnet"], global_batch=6 * world, steps=3, lr=1e-3)
    for strategy in strategies(world, text):
        yield Training(f"gpt2-{strategy.name}", text, strategy.framework, "adamw")
    for strategy in strategies(world, images):
        yield Training(f"resnet-{strategy.name}", images, strategy.framework)
    untied = replace(text, model=replace(GPT2, tie_weights=False))  # pyright: ignore
    yield Training("gpt2-local_sgd", text, LocalSGD(local_steps=2), "adamw")
    yield Training("gpt2-pipedream", untied, PipeDream(), "adamw")
    yield Training("gpt2-pipedream_2bw", text, PipeDream(double_buffered=True), "adamw")
    yield Training("resnet-local_sgd", images, LocalSGD(local_steps=2))
    # Without validation replicas keep their own running statistics from epoch to epoch.
    yield Training("resnet-ddp-without-validation", images, DDP(), validate=False)
    yield Training("gpt2-ddp-fp16", replace(text, precision="fp16", clip_norm=0.5), DDP(), "adamw")


def wanted(world: int, quick: bool) -> list[Training]:
    return [each for each in trainings(world) if (each.name in QUICK and world == 2) == quick]


@cache
def courses(world: int, quick: bool) -> tuple[list[dict[str, Course]], list[dict[str, Course]]]:
    """Of every rank, the uninterrupted trainings, which leave checkpoints, and in new processes the continued ones."""
    chosen = wanted(world, quick)
    with TemporaryDirectory() as folder:
        whole = run_ranks(world, train_all, chosen, folder, 1, timeout_s=600)
        left = {path.relative_to(folder).as_posix() for path in Path(folder).glob("*/checkpoints-1/*")}
        assert left == {f"{each.name}/checkpoints-1/epoch-{EVERY:06}" for each in chosen}
        return whole, run_ranks(world, train_all, chosen, folder, 2, timeout_s=600)


TRAININGS = [
    pytest.param(world, quick, each.name, id=f"{world}-ranks-{each.name}", marks=[] if quick else [pytest.mark.slow])
    for world in (1, 2)
    for quick in (True, False)
    for each in wanted(world, quick)
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "quick", "name"), TRAININGS)
def test_a_resumed_run_equals_an_uninterrupted_one(world: int, quick: bool, name: str) -> None:
    for whole, resumed in zip(*([each[name] for each in ranks] for ranks in courses(world, quick)), strict=True):
        assert list(resumed.metrics) == list(range(EVERY, EPOCHS))  # no epoch is trained twice
        for epoch in resumed.metrics:
            assert resumed.losses[epoch] == whole.losses[epoch]
            assert resumed.rates[epoch] == whole.rates[epoch]
            assert resumed.metrics[epoch] == whole.metrics[epoch]
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
    found = resumed.notes["resume"]
    assert (found["attempt"], found["epoch"], found["updates"]) == (1, EVERY, EVERY * 3)
    assert found["epochs"] == [{"epoch": 0}, {"epoch": 1}]
    assert found["seconds"] > 0
    assert "checkpoints" not in resumed.notes  # nothing follows the last epoch


def test_seconds_go_on_where_they_were() -> None:
    whole, resumed = (ranks[0]["gpt2-ddp"] for ranks in courses(2, True))
    assert resumed.began_s[0] == pytest.approx(whole.elapsed_s[EVERY - 1])
    assert resumed.began_s[1] == pytest.approx(resumed.elapsed_s[0])
