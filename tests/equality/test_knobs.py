"""Whatever its knobs are, a framework trains what one plain process or DDP trains; with a planted fault it does not. It
computes with a state that is loaded, and all ranks skip an update and drop units together.

The frameworks with the knobs of their YAMLs, each in every case, are in test_equal_training.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.frameworks.ddp import DDP
from ddlbench.job import Framework
from tests.equality.chosen import Chosen, for_each
from tests.equality.distances import TOLERANCES, assert_equal, distance
from tests.equality.knobs import CASE, DROPPING, FAULTS, KNOBS, OVERFLOWING, RELOADED, SLOW, Knob
from tests.support.changed_job import changed
from tests.support.equal import assert_reloaded, make_job, overflow, ready, reload, train_cases
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome, reference

Key = tuple[int, str, str]  # ranks, framework, knob


def train(knob: Knob) -> list[Outcome]:
    """The outcome of the knob, and then that of DDP where it must be the same."""
    asked: list[tuple[Case, Framework]] = [(knob.case, changed(knob.framework, **knob.changes))]
    if knob.as_ddp is not None:
        asked.append((knob.case, changed(DDP(), **knob.as_ddp)))
    with torch.compiler.set_stance("force_eager"):  # megatron-core's fused formulas
        return train_cases(asked)


def dropped(case: Case, framework: Framework) -> list[dict[str, Tensor]]:
    """Parameters that every rank has whole, after two updates with dropout while one rank draws numbers in between; the
    second time with blocks that run again."""
    result: list[dict[str, Tensor]] = []
    model: Any = replace(case.model, dropout=0.5)  # pyright: ignore
    for again in (False, True):
        with ready(framework, make_job(replace(case, model=model, checkpoint_activations=again))) as (trainer, batch):
            for _ in range(2):
                torch.rand(dist.get_rank() + 1)  # as a loader would on the rank that reads
                trainer.step(batch)
            named = trainer.model.named_parameters()
            result.append({name: each.detach().clone() for name, each in named if name not in trainer.splits})
    return result


def overflow_of(framework: Framework, changes: dict[str, Any], only: str) -> tuple[int, bool, int, bool]:
    return overflow(framework, replace(make_job(replace(CASE, precision="fp16")), **changes), only)


KNOBS_OF = {(*group, name): knob for group, knobs in KNOBS.items() for name, knob in knobs.items()}
FAULTS_OF = {(2, "fault", name): knob for name, knob in FAULTS.items()}
WORK: dict[Key, Callable[[], Any]] = {key: partial(train, knob) for key, knob in (KNOBS_OF | FAULTS_OF).items()}
WORK |= {(2, "reloaded", name): partial(reload, *given) for name, given in RELOADED.items()}
WORK |= {(2, "dropout", name): partial(dropped, *given) for name, given in DROPPING.items()}
WORK |= {(2, "overflow", name): partial(overflow_of, *given) for name, given in OVERFLOWING.items()}


def work(keys: list[Key]) -> dict[Key, Any]:
    linear, results = torch.nn.functional.linear, dict[Key, Any]()
    for key in keys:
        try:
            results[key] = WORK[key]()
        except Exception as error:
            error.add_note(f"while {key} was tried")
            raise
        torch.nn.functional.linear = linear  # DeepSpeed's stage 3 leaves its own there, for all that follows
    return results


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Chosen:
    """By rank, what each piece of work returned: one set of processes for each number of ranks."""
    return Chosen(request, lambda key: key[0], lambda keys: run_ranks(keys[0][0], work, keys))


def is_slow(key: Key) -> bool:
    return key in SLOW or key[:2] in SLOW


def plain(key: Key, framework: Framework, case: Case) -> Outcome:
    """What one process trains that simulates the replicas."""
    layout = getattr(framework, "layout", None)
    return reference(case, layout(key[0]).dp if layout else key[0])


@for_each(KNOBS_OF, is_slow)
def test_a_knob_trains_as_one_process_or_ddp(key: Key, found: Chosen) -> None:
    knob, (outcome, *of_ddp) = KNOBS_OF[key], found(key)[0][key]
    expected = plain(key, knob.framework, knob.case)
    for ddp in of_ddp:
        assert outcome.updates == ddp.updates > 0
        expected = replace(ddp, start=expected.start)
    if knob.within is None:
        assert_equal(outcome, expected, TOLERANCES[knob.case.model.name, knob.case.precision])
    assert all(weight.dtype == expected.weights[name].dtype for name, weight in outcome.weights.items())
    off = distance(outcome.weights, expected)
    assert knob.beyond <= off
    assert knob.within is None or off <= knob.within
    if knob.unlike is not None:
        assert distance(outcome.weights, plain(key, knob.framework, knob.unlike)) > off
    if getattr(knob.case.model, "tie_weights", False):
        assert torch.equal(outcome.weights["embed.wte.weight"], outcome.weights["head.weight"])


@for_each(FAULTS_OF, is_slow)
def test_a_planted_fault_is_noticed(key: Key, found: Chosen) -> None:
    knob = FAULTS_OF[key]
    tolerance = TOLERANCES[knob.case.model.name, knob.case.precision].weights
    (outcome,) = found(key)[0][key]
    assert distance(outcome.weights, plain(key, knob.framework, knob.case)) > (knob.beyond or 100 * tolerance)


@for_each([key for key in WORK if key[1] == "reloaded"], is_slow)
def test_a_loaded_state_is_what_a_trainer_computes_with_and_gives_back(key: Key, found: Chosen) -> None:
    assert_reloaded((rank[key] for rank in found(key)), RELOADED[key[2]][0].model)


@for_each([key for key in WORK if key[1] == "overflow"], is_slow)
def test_all_ranks_skip_an_update_that_overflows_on_one(key: Key, found: Chosen) -> None:
    assert [rank[key] for rank in found(key)] == [(1, False, 2, True)] * 2


@for_each([key for key in WORK if key[1] == "dropout"], is_slow)
def test_whole_activations_lose_the_same_units_on_every_rank(key: Key, found: Chosen) -> None:
    """Also where a block runs again."""
    (plain, again), (other, _) = (rank[key] for rank in found(key))
    assert any("ln_1" in name or "layernorm" in name for name in plain)
    for name, weight in plain.items():
        assert torch.equal(weight, other[name]), name
        assert torch.equal(weight, again[name]), name
