"""Local SGD's own rule: averaged after every update it is plain data parallel training (for SGD, whose momentum is
linear in the gradients, without clipping); averaged less often it is a simulation of the replicas one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.frameworks.local_sgd import LocalReplica, LocalSGD
from ddlbench.job import Batch
from ddlbench.ranks.control import all_gather
from ddlbench.record.run_json import weights_hash
from tests.equality.cases import CASES
from tests.equality.distances import TOLERANCES, assert_equal, distance
from tests.support.broken import broken
from tests.support.equal import make_job, outputs, ready, train_case, train_cases
from tests.support.jobs import two_ranks, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case, Outcome, apart, reference

BY_NAME = {case.name: case for case in CASES}
QUICK = ("resnet-fp32-whole", "vgg-fp32-whole", "gpt2-fp32-whole", "gpt2-bf16-accumulated", "gpt2-checkpointed-clipped")
Key = tuple[str, int]  # case, local steps


def simulation(case: Case, replicas: int, local_steps: int) -> Outcome:
    def meet(models: list[nn.Module], step: int) -> None:
        if step % local_steps == 0 or step == case.steps:
            average(models)

    return apart(case, replicas, meet)


def average(models: list[nn.Module]) -> None:
    states = [model.state_dict() for model in models]
    means = {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}
    for model in models:
        model.load_state_dict(means)


def expected(case: Case, ranks: int, local_steps: int) -> Outcome:
    if local_steps == 1 and case.clip_norm is None:
        return reference(case, ranks)
    return simulation(case, ranks, local_steps)


def at(ranks: int, name: str) -> Case:
    """Six samples a replica: they divide into the same micro batches at any number of ranks."""
    return replace(BY_NAME[name], global_batch=6 * ranks)


def names(ranks: int) -> list[str]:
    return list(BY_NAME) if ranks == 2 else list(QUICK)


def is_slow(ranks: int, name: str) -> bool:
    return ranks != 2 or name not in QUICK


TRAININGS = [
    pytest.param(ranks, name, steps, marks=[pytest.mark.slow] if is_slow(ranks, name) else [])
    for ranks in (1, 2, 4)
    for name in names(ranks)
    for steps in (1, 2)
]


@pytest.mark.parametrize(("ranks", "name", "local_steps"), TRAININGS)
def test_local_sgd_trains_by_its_rule(ranks: int, name: str, local_steps: int) -> None:
    result = trained(ranks) if is_slow(ranks, name) else seen()[0]["trained"]
    case = at(ranks, name)
    assert_equal(
        result[name, local_steps], expected(case, ranks, local_steps), TOLERANCES[case.model.name, case.precision]
    )


@cache
def trained(ranks: int) -> dict[Key, Outcome]:
    """The slow cases at one number of ranks, in one set of processes."""
    keys = [(name, steps) for name in names(ranks) for steps in (1, 2) if is_slow(ranks, name)]
    return dict(zip(keys, run_ranks(ranks, train_cases, works(ranks, keys))[0], strict=True))


def works(ranks: int, keys: Sequence[Key]) -> list[tuple[Case, LocalSGD]]:
    return [(at(ranks, name), LocalSGD(local_steps=steps)) for name, steps in keys]


def late(trainer: LocalReplica) -> None:
    """The first average comes a step late."""
    begin = trainer.step

    def step(batch: Batch | None) -> Tensor | None:
        trainer.updates_since_average, trainer.step = -1, begin
        return begin(batch)

    trainer.step = step


def forgetful(trainer: LocalReplica) -> None:
    """Momentum is lost when replicas are averaged."""
    average = trainer.flush

    def flush() -> None:
        average()
        trainer.optimizer.state.clear()

    trainer.flush = flush


def quick() -> dict[Key, Outcome]:
    keys = [(name, steps) for name in QUICK for steps in (1, 2)]
    return dict(zip(keys, train_cases(works(2, keys)), strict=True))


def faulty() -> list[Outcome]:
    framework = LocalSGD(local_steps=2)
    return [train_case(at(2, "gpt2-fp32-whole"), broken(framework, fault)) for fault in (late, forgetful)]


def meetings() -> tuple[list[bool], dict[str, object]]:
    """Whether all replicas are the same after each of three updates; after reading the state; after one more update
    and an evaluation."""
    same: list[bool] = []
    with ready(LocalSGD(local_steps=2), make_job(at(2, "resnet-fp32-whole")), dist.get_rank()) as (trainer, batch):
        for _ in range(3):
            trainer.step(batch)
            same.append(alike(trainer))
        trainer.state()
        same.append(alike(trainer))
        trainer.step(batch)
        outputs(trainer, batch)
        same.append(alike(trainer))
        return same, trainer.facts()


def alike(trainer: LocalReplica) -> bool:
    return len(set(all_gather(weights_hash(trainer.model.state_dict())))) == 1


def restored() -> list[float]:
    """Losses of three updates from the first weights, and again from the same weights loaded."""
    losses = list[float]()
    with ready(LocalSGD(local_steps=2), make_job(at(2, "vgg-fp32-whole")), dist.get_rank()) as (trainer, batch):
        start = deepcopy(trainer.model.state_dict())
        for _ in range(2):
            trainer.load(start)
            trainer.optimizer.state.clear()
            losses.append(sum(float(trainer.step(batch)) for _ in range(3)))
    return losses


WORK: dict[str, Callable[[], Any]] = {
    "trained": quick, "faulty": faulty, "meetings": meetings, "restored": restored,
}  # fmt: skip


@cache
def seen() -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(2, results, WORK)


def test_the_rule_notices_a_planted_fault() -> None:
    right, tolerance = simulation(at(2, "gpt2-fp32-whole"), 2, 2), TOLERANCES["gpt2", "fp32"].weights
    assert min(distance(outcome.weights, right) for outcome in seen()[0]["faulty"]) > 10 * tolerance


def test_weights_are_averaged_after_local_steps_and_before_they_are_read() -> None:
    for rank in seen():
        facts = {"staleness": 0, "local_steps": 2, "reduce_dtype": "fp32"}
        assert rank["meetings"] == ([False, True, False, True, True], facts)


def test_training_continues_from_loaded_weights() -> None:
    for rank in seen():
        assert rank["restored"][0] == rank["restored"][1]


def test_a_number_of_local_steps_is_one_or_more() -> None:
    LocalSGD().check(two_ranks())
    wrong_knob(LocalSGD, r"framework\.local_steps=0 must be 1 or more", local_steps=0)
