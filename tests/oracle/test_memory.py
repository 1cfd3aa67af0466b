"""Predicted bytes of a rank beside those that two real ranks hold: every framework, three models."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.calibration import FRAMEWORKS, MODELS, Measurement, words
from benchmarks.held import before_update, gradients, model_of, optimizer, parameters, storages, total, watch_gradients
from benchmarks.steps import batch_of
from ddlbench.config.compose import configuration, configurations
from ddlbench.config.schema import Config
from ddlbench.oracle.inputs import OneStep, from_one_step
from ddlbench.oracle.machine import Link, load
from ddlbench.oracle.predictor import Known, predict
from ddlbench.ranks.launch import detect
from ddlbench.run.assembly import make_job
from tests.support.ranks import run_ranks

RANKS = 2
SMALL = ("model.image_size=32",)
PARTS = ("weights", "gradients", "optimizer", "activations")
HANDED_ON = ("zero2", "zero3", "fsdp")
CASES = [(model, name) for model in MODELS for name in FRAMEWORKS]


@dataclass
class Held:
    """Bytes of one rank as the update begins; activations, and gradients that no library hands on bucket by bucket, at
    most during the step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


class Kept:
    """Bytes that autograd keeps, each storage once and no weights: now, and at most so far."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.uses, self.now, self.most = model, Counter[int](), 0, 0

    def pack(self, tensor: Tensor) -> Saved:
        """Weights may be there for the block alone: which memory is theirs is asked when a tensor is kept."""
        memory = tensor.untyped_storage()
        own = memory.data_ptr() not in storages(self.model.parameters())
        return Saved(self, tensor, memory.data_ptr(), memory.nbytes() if own else 0)

    def enter(self, place: int, bytes_: int) -> None:
        self.now += 0 if self.uses[place] else bytes_
        self.uses[place] += 1
        self.most = max(self.most, self.now)

    def leave(self, place: int, bytes_: int) -> None:
        self.uses[place] -= 1
        self.now -= 0 if self.uses[place] else bytes_


class Saved:
    """A kept tensor; forgotten when autograd drops it."""

    def __init__(self, kept: Kept, tensor: Tensor, place: int, bytes_: int) -> None:
        self.kept, self.tensor, self.place, self.bytes_ = kept, tensor, place, bytes_
        kept.enter(place, bytes_)

    def __del__(self) -> None:
        self.kept.leave(self.place, self.bytes_)


def config_of(model: str, name: str) -> Config:
    small = SMALL if model != "gpt2_small" else ()
    return configuration(*words(Measurement("step", model, name, RANKS)), *small)


def hold_all() -> dict[tuple[str, str], Held]:
    with configurations():
        return {case: hold(config_of(*case)) for case in CASES}


def hold(config: Config) -> Held:
    """One framework on this rank, trained for three updates and closed."""
    framework: Any = config.framework
    job = make_job(config, detect(), torch.device("cpu"))
    framework.check(job)
    trainer = framework.setup(job)
    model = model_of(trainer)
    batch = batch_of(job, trainer)
    for _ in range(2):
        trainer.step(batch)
    most: list[int] = []
    seen: dict[str, int] = {}
    watch_gradients(model, most)
    before_update(trainer, lambda: seen.update(look(trainer)))
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda saved: saved.tensor):
        trainer.step(batch)
    dist.barrier()
    trainer.close()
    grads = seen["gradients"] if framework.name in HANDED_ON else max(seen["gradients"], *most)
    return Held(seen["weights"], grads, seen["optimizer"], kept.most)


def look(trainer: Any) -> dict[str, int]:
    own, grads = parameters(trainer), gradients(trainer)
    return {
        "weights": total(own),
        "gradients": total(grads, own),
        "optimizer": total(optimizer(trainer), own, grads),
    }


@cache
def held() -> list[dict[tuple[str, str], Held]]:
    return run_ranks(RANKS, hold_all, timeout_s=500)


def predicted(model: str, name: str) -> dict[str, float]:
    links = (Link("made", 1e-6, 1e9),) * 2
    machine = replace(load("local"), links=links, cores=2)
    config = config_of(model, name)
    row = predict(
        config, config.framework, RANKS, Known(machine, lambda asked, _: from_one_step(asked, machine, OneStep(1.0)))
    )
    assert row.memory is not None, row.reason
    return dict(row.memory)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "name"), CASES)
def test_predicted_bytes_are_those_of_the_fullest_rank(model: str, name: str) -> None:
    fullest = max((rank[model, name] for rank in held()), key=lambda each: each.total)
    with configurations():
        expected = predicted(model, name)
    for part in PARTS:
        assert expected[part] == pytest.approx(getattr(fullest, part), rel=0.05), part
