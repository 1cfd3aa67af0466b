"""The central test: every framework trains what one plain process trains (docs/adr/0001)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ddlbench.record.run_json import weights_hash
from tests.equality.cases import CASES, at, plain_process
from tests.equality.chosen import Chosen, for_each
from tests.equality.distances import TOLERANCES, assert_equal
from tests.support.equal import train_cases
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome
from tests.support.strategies import Strategy, strategies

# The other cases and more ranks are for the long tests. A VGG has what no ResNet has where its layers are cut.
QUICK = {"resnet-fp32-whole", "gpt2-fp32-whole"}
QUICK_OF_THE_CUT = {"vgg-fp32-whole"}
QUICK_OF_THE_BASES = {"vgg-fp32-whole", "gpt2-bf16-accumulated", "resnet-checkpointed-clipped"}
CUT = {"tensor", "channel", "hybrid-tp"}
BASES = {"single", "ddp"}


def short(world: int, case: Case) -> Case:
    """Three updates in the quick case of all frameworks: they show momentum, too. More ranks make five."""
    return replace(at(world, case), steps=3) if world <= 2 and case.name.endswith("-fp32-whole") else at(world, case)


Key = tuple[int, str, str]  # ranks, case, framework
TRAININGS: dict[Key, tuple[Case, Strategy]] = {
    (world, case.name, strategy.name): (short(world, case), strategy)
    for world in (1, 2, 3, 4)
    for case in CASES
    for strategy in strategies(world, case)
}


def is_quick(key: Key) -> bool:
    world, case, strategy = key
    more = QUICK_OF_THE_BASES if strategy in BASES else QUICK_OF_THE_CUT if strategy in CUT else set[str]()
    return world <= 2 and case in QUICK | more


def set_of(key: Key) -> tuple[int, str]:
    """The trainings that one set of processes makes: the quick ones of a number of ranks, or those of a slow case. All
    slow cases of two ranks take half an hour, and more than a set may take on a busy machine."""
    return key[0], "quick" if is_quick(key) else key[1]


def train(keys: Sequence[Key]) -> dict[Key, Outcome]:
    work = [(case, strategy.framework) for case, strategy in map(TRAININGS.__getitem__, keys)]
    return dict(zip(keys, run_ranks(keys[0][0], train_cases, work)[0], strict=True))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Chosen:
    return Chosen(request, set_of, train)


@cache
def plain(world: int, case: str, replicas: int, micro_batch: int | None, policy: bool) -> Outcome:
    given, _ = TRAININGS[world, case, "ddp"]
    return plain_process(given, replicas, micro_batch, policy)


@for_each(TRAININGS, lambda key: not is_quick(key))
def test_equals_one_plain_process(key: Key, outcomes: Chosen) -> None:
    (world, name, _), (case, strategy), outcome = key, TRAININGS[key], outcomes(key)[key]
    expected = plain(world, name, strategy.replicas, strategy.micro_batch, strategy.policy)
    assert_equal(outcome, expected, TOLERANCES[case.model.name, case.precision])
    written = expected_ledger(case, expected)
    assert {name: outcome.ledger[name] for name in written} == written


def expected_ledger(case: Case, expected: Outcome) -> dict[str, Any]:
    """What is the same in the record of every framework; replicas and micro batches may differ."""
    return {
        "samples": case.steps * case.global_batch, "updates": case.steps, "skipped_updates": 0,
        "dropped_samples_per_epoch": 5, "global_batch": case.global_batch, "precision": case.precision,
        "reduce_dtype": "fp32", "clip_norm": case.clip_norm, "weight_decay": 1e-4, "label_smoothing": 0.0,
        "seed": case.seed, "lr_first": case.lr, "lr_last": case.lr, "weights_hash_start": weights_hash(expected.start),
    }  # fmt: skip
