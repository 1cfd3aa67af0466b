"""AdamW in 8 bits on two ranks: frameworks train what one plain process trains; ddp and fsdp hold the bytes of the
formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.measure.formulas.memory_formula import bytes_of_parameter, data_parallel
from ddlbench.models.gpt2 import GPT2
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer, optimizers
from tests.support.changed_job import changed
from tests.support.equal import make_job, ready, train_case
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case, Outcome, accumulate, begin, buffers, forward, order, snapshot

RANKS = 2
# The halves of the matrices are no multiples of 256 numbers, and those of 127 rows are unequal.
MODEL = GPT2("gpt2", n_layer=2, n_embd=72, n_head=4, vocab_size=127, seq_len=16, dropout=0.0)
CASE = Case("gpt2-8bit", MODEL, global_batch=12, steps=4, lr=1e-3)
SHARDED: dict[str, Any] = {"fsdp": FSDP(), "sharded stages": Pipeline(dp=2, sharded=True)}
FRAMEWORKS: dict[str, Any] = {
    "ddp": DDP(),
    "zero0": DeepSpeed(zero_stage=0),
    "parameter_server": ParameterServer(),
    "zbv": Pipeline(schedule="zbv", virtual_stages=2),
    **SHARDED,
}


def adamw(name: str = "adamw8bit") -> Callable[..., torch.optim.Optimizer]:
    config = OptimizerConfig(name, lr=CASE.lr, betas=[0.9, 0.95], weight_decay=0.1)
    return partial(make_optimizer, config)


def train_all() -> dict[str, Outcome]:
    return {name: train_case(CASE, changed(framework, optimizer=adamw())) for name, framework in FRAMEWORKS.items()}


def held() -> dict[str, int]:
    """Bytes of the optimizer's state on this rank, without the numbers of updates."""
    result: dict[str, int] = {}
    for framework in (DDP(), FSDP()):
        with ready(framework, replace(make_job(CASE), optimizer=adamw())) as (trainer, batch):
            trainer.step(batch)
            states = trainer.optimizer.state.values()
            values = [value for state in states for name, value in state.items() if name != "step"]
            local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
            result[framework.name] = sum(value.nbytes for value in local)
    return result


@cache
def found() -> dict[str, Any]:
    """What rank 0 found."""
    return run_ranks(RANKS, results, {"trained": train_all, "held": held})[0]


@cache
def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process that averages the gradients of two replicas in turn. name: of the optimizer"""
    model, _ = begin(CASE)
    optimizer = adamw(name)(model.named_parameters())
    statistics, losses = [buffers(model) for _ in range(RANKS)], list[float]()
    for chosen in order(CASE).split(CASE.global_batch)[: CASE.steps]:
        losses.append(accumulate(CASE, model, statistics, chosen, lambda inputs: forward(CASE, model, inputs)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, snapshot(model)


def apart(ours: dict[str, Tensor], others: dict[str, Tensor]) -> Tensor:
    """How far each number is from the other's, in learning rates, the distance that Adam moves a weight."""
    return torch.cat([(ours[name] - others[name]).abs().flatten() / CASE.lr for name in others])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_losses_are_those_of_one_process(name: str) -> None:
    """The first two losses do not depend on any rounding of moments: weights move by moments in fp32. Later ones differ
    by less than those of AdamW in 32 bits do, from which only the rounding differs."""
    losses = found()["trained"][name].losses
    expected, exact = plain("adamw8bit")[0], plain("adamw")[0]
    assert losses[:2] == pytest.approx(expected[:2], abs=1e-5)
    off = max(abs(one - other) for one, other in zip(expected, exact, strict=True))
    assert losses == pytest.approx(expected, abs=2 * off if name in SHARDED else 1e-4)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_weights_are_those_of_one_process(name: str) -> None:
    """Full layers have the blocks of one process: where the last bit of a gradient moves a number into the next code,
    its next step changes by up to a gap, and that is rare. Sharded blocks begin with each shard: these weights are no
    further from those of one process than rounding in other blocks moves them, as far as those of AdamW in 32 bits."""
    distance = apart(found()["trained"][name].weights, plain("adamw8bit")[1])
    rounding = apart(plain("adamw")[1], plain("adamw8bit")[1])
    if name not in SHARDED:
        assert (distance > 0.01).float().mean() < 0.01
    assert distance.mean() < rounding.mean()


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_rank_holds_the_bytes_of_the_formula(name: str) -> None:
    """fsdp: on the rank with the larger half of uneven rows; the other one has as many scales."""
    sizes = [(weight.shape[0], weight[:1].numel()) for weight in MODEL.build().parameters()]
    stage, shards = (3, RANKS) if name == "fsdp" else (0, 1)
    held = [-(-rows // shards) * row for rows, row in sizes]
    formula = bytes_of_parameter(optimizers["adamw8bit"].costs, sizes=held)
    assert found()["held"][name] == round(formula.optimizer * sum(held))
    # The oracle's, which divides numbers and not rows.
    count = sum(rows * row for rows, row in sizes)
    assert data_parallel(count, formula, stage, RANKS).optimizer == pytest.approx(found()["held"][name], rel=0.01)
    wide = bytes_of_parameter(optimizers["adamw"].costs)
    assert found()["held"][name] < 0.4 * data_parallel(count, wide, stage, RANKS).optimizer
