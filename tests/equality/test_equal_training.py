"""The central test: every framework trains what one plain process trains (docs/adr/0001)."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from ddlbench.record.run_json import weights_hash
from tests.equality.cases import CASES, at, plain_process
from tests.equality.distances import TOLERANCES, assert_equal
from tests.support.equal import train_cases
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome
from tests.support.strategies import Strategy, strategies

# The other cases and more ranks are for the long tests.
QUICK = {"resnet-fp32-whole", "vgg-fp32-whole", "gpt2-fp32-whole"}
QUICK_OF_THE_BASES = {"gpt2-bf16-accumulated", "resnet-checkpointed-clipped"}
BASES = {"single", "ddp"}


def is_quick(world: int, case: Case, strategy: Strategy) -> bool:
    quick = QUICK | (QUICK_OF_THE_BASES if strategy.name in BASES else set())
    return world <= 2 and case.name in quick


def strategies_of(world: int, case: Case, quick: bool) -> list[Strategy]:
    return [strategy for strategy in strategies(world, case) if is_quick(world, case, strategy) == quick]


@cache
def outcomes(world: int, slow_case: str | None) -> dict[tuple[str, str], Outcome]:
    """The quick cases of every framework at one world size, or a slow one, trained in one set of processes. All slow
    cases of two ranks take half an hour, and more than a set may take on a busy machine."""
    work = {
        (case.name, strategy.name): (at(world, case), strategy.framework)
        for case in CASES
        for strategy in strategies_of(world, case, slow_case is None)
        if slow_case in (None, case.name)
    }
    result = run_ranks(world, train_cases, list(work.values()))[0]
    return dict(zip(work, result, strict=True))


TRAININGS = [
    pytest.param(
        world,
        quick,
        case,
        id=f"{world}-ranks-{case.name}-{'quick' if quick else 'rest'}",
        marks=[] if quick else [pytest.mark.slow],
    )
    for world in (1, 2, 3, 4)
    for quick in (True, False)
    for case in CASES
    if strategies_of(world, case, quick)
]


@pytest.mark.parametrize(("world", "quick", "case"), TRAININGS)
def test_equals_one_plain_process(world: int, quick: bool, case: Case) -> None:
    result = outcomes(world, None if quick else case.name)
    plain = cache(partial(plain_process, at(world, case)))
    unequal: dict[str, str] = {}
    for strategy in strategies_of(world, case, quick):
        expected = plain(strategy.replicas, strategy.micro_batch, strategy.policy)
        try:
            outcome = result[case.name, strategy.name]
            assert_equal(outcome, expected, TOLERANCES[case.model.name, case.precision])
            written = expected_ledger(at(world, case), expected)
            assert {name: outcome.ledger[name] for name in written} == written
        except AssertionError as error:
            unequal[strategy.name] = str(error)
    assert not unequal, "\n".join(f"{name}: {text}" for name, text in unequal.items())


def expected_ledger(case: Case, expected: Outcome) -> dict[str, Any]:
    """What is the same in the record of every framework; replicas and micro batches may differ."""
    return {
        "samples": case.steps * case.global_batch, "updates": case.steps, "skipped_updates": 0,
        "dropped_samples_per_epoch": 5, "global_batch": case.global_batch, "precision": case.precision,
        "reduce_dtype": "fp32", "clip_norm": case.clip_norm, "weight_decay": 1e-4, "label_smoothing": 0.0,
        "seed": case.seed, "lr_first": case.lr, "lr_last": case.lr, "weights_hash_start": weights_hash(expected.start),
    }  # fmt: skip
