"""AdamW in 8 bits on two ranks: frameworks train what one plain process trains; ddp and fsdp hold the bytes of the
formula."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.measure.formulas.memory_formula import bytes_of_parameter, data_parallel
from ddlbench.models.gpt2 import GPT2
from ddlbench.recipe.adamw8bit import local
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer, optimizers
from tests.support.equal import feed_of, make_job, ready
from tests.support.ranks import run_ranks
from tests.support.reference import Case, accumulate, begin, buffers, forward, order

RANKS = 2
# The halves of the matrices are no multiples of 256 numbers, and those of 127 rows are unequal.
MODEL = GPT2("gpt2", n_layer=2, n_embd=72, n_head=4, vocab_size=127, seq_len=16, dropout=0.0)
CASE = Case("gpt2-8bit", MODEL, global_batch=12, steps=4, lr=1e-3)
OPTIMIZER = OptimizerConfig("adamw8bit", lr=CASE.lr, betas=[0.9, 0.95], weight_decay=0.1)
SHARDED: dict[str, Any] = {"fsdp": FSDP(), "sharded stages": Pipeline(dp=2, sharded=True)}
FRAMEWORKS: dict[str, Any] = {
    "ddp": DDP(),
    "zero0": DeepSpeed(zero_stage=0),
    "parameter_server": ParameterServer(),
    "zbv": Pipeline(schedule="zbv", virtual_stages=2),
    **SHARDED,
}


@dataclass
class Trained:
    """losses: of each update, where the rank reports them; weights: on rank 0; held: bytes of the optimizer's state on
    this rank, without the numbers of updates"""

    losses: list[float]
    weights: dict[str, Tensor]
    held: int


def train_all() -> dict[str, Trained]:
    return {name: train(framework) for name, framework in FRAMEWORKS.items()}


def train(framework: Any) -> Trained:
    job = make_job(CASE)
    object.__setattr__(job, "optimizer", partial(make_optimizer, OPTIMIZER))
    framework.check(job)
    with ready(framework, job) as (trainer, _), closing(feed_of(CASE, job, trainer.place)) as feed:
        losses = [loss.item() for batch in feed.train(0) if (loss := trainer.step(batch)) is not None]
        trainer.flush()
        states = trainer.optimizer.state.values()
        held = sum(local(value).nbytes for state in states for name, value in state.items() if name != "step")
        return Trained(losses, trainer.state() or {}, held)


@cache
def results() -> list[dict[str, Trained]]:
    return run_ranks(RANKS, train_all)


@cache
def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process that averages the gradients of two replicas in turn. name: of the optimizer"""
    model, _ = begin(CASE)
    config = OptimizerConfig(name, lr=CASE.lr, betas=[0.9, 0.95], weight_decay=0.1)
    optimizer = make_optimizer(config, model.named_parameters())
    statistics, losses = [buffers(model) for _ in range(RANKS)], list[float]()
    for chosen in order(CASE).split(CASE.global_batch)[: CASE.steps]:
        losses.append(accumulate(CASE, model, statistics, chosen, lambda inputs: forward(CASE, model, inputs)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def apart(ours: dict[str, Tensor], others: dict[str, Tensor]) -> Tensor:
    """How far each number is from the other's, in learning rates, the distance that Adam moves a weight."""
    return torch.cat([(ours[name] - others[name]).abs().flatten() / CASE.lr for name in others])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_losses_are_those_of_one_process(name: str) -> None:
    """The first two losses do not depend on any rounding of moments: weights move by moments in fp32. Later ones differ
    by less than those of AdamW in 32 bits do, from which only the rounding differs."""
    reported = [losses for rank in results() if (losses := rank[name].losses)]
    losses = [sum(step) / len(step) for step in zip(*reported, strict=True)]
    expected, exact = plain("adamw8bit")[0], plain("adamw")[0]
    assert losses[:2] == pytest.approx(expected[:2], abs=1e-5)
    off = max(abs(one - other) for one, other in zip(expected, exact, strict=True))
    assert losses == pytest.approx(expected, abs=2 * off if name in SHARDED else 1e-4)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_weights_are_those_of_one_process(name: str) -> None:
    """Full layers have the blocks of one process: where the last bit of a gradient moves a number into the next code,
    its next step changes by up to a gap, and that is rare. Sharded blocks begin with each shard: these weights are no
    further from those of one process than rounding in other blocks moves them, as far as those of AdamW in 32 bits."""
    distance = apart(results()[0][name].weights, plain("adamw8bit")[1])
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
    assert results()[0][name].held == round(formula.optimizer * sum(held))
    # The oracle's, which divides numbers and not rows.
    count = sum(rows * row for rows, row in sizes)
    assert data_parallel(count, formula, stage, RANKS).optimizer == pytest.approx(results()[0][name].held, rel=0.01)
    wide = bytes_of_parameter(optimizers["adamw"].costs)
    assert results()[0][name].held < 0.4 * data_parallel(count, wide, stage, RANKS).optimizer
