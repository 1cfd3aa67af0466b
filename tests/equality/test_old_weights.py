"""Pipelines that train with old weights, against one plain process whose weights are as old as they should be, and
against the papers' rules that correct them (support/corrections.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.job import Batch, Model
from ddlbench.models.gpt2 import GPT2
from tests.equality.cases import MODELS, RATES
from tests.equality.chosen import Chosen, for_each
from tests.equality.distances import TOLERANCES, Tolerance, assert_equal, assert_same_bits, distance
from tests.support.broken import broken, prompt, unstashed
from tests.support.corrections import PipeMare, SpecTrain, XPipe
from tests.support.equal import train_case, train_cases
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome, Rule, reference, stale_reference

TIED, RESNET, VGG = MODELS["gpt2"], MODELS["resnet"], MODELS["vgg"]
UNTIED = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0, tie_weights=False)
CHANGING = [0.02, 0.03, 0.005, 0.04, 0.01]
# VGG's weights must change enough in five updates for their age to be measurable.
RATES_HERE = {**RATES, "vgg": 0.5}
Rules = Callable[[Mapping[str, int]], Rule]


def no_rule(ages: Mapping[str, int]) -> Rule:
    return Rule()


def emptied(trainer: Any) -> None:
    """Not a fault: an epoch ends after three minibatches."""
    own, steps = trainer.step, list[None]()

    def step(batch: Batch | None) -> Tensor | None:
        loss = own(batch)
        steps.append(None)
        if len(steps) == 3:
            trainer.flush()
        return loss

    trainer.step = step


@dataclass(frozen=True)
class Trial:
    """staleness: of each stage, in updates, worked out by hand; rules: as `stale_reference` takes them; change: of the
    trainer"""

    case: Case
    framework: PipeDream
    staleness: Sequence[int]
    rules: Rules = no_rule
    replicas: int = 1
    change: Callable[[Any], None] | None = None

    def train(self) -> Outcome:
        return train_case(self.case, broken(self.framework, self.change) if self.change else self.framework)

    def expected(self, staleness: Sequence[int] = (), rules: Rules | None = None) -> Outcome:
        assert self.framework.balance is not None
        ages, empty = staleness or self.staleness, 3 if self.change is emptied and not staleness else 0
        return stale_reference(self.case, self.framework.balance, ages, self.replicas, empty, rules or self.rules)


def trial(
    model: Model, framework: PipeDream, staleness: Sequence[int], change: Any = None, replicas: int = 1, **of_case: Any
) -> Trial:
    case = Case(model.name, model, **{"lr": RATES_HERE[model.name], **of_case})
    return Trial(case, framework, staleness, replicas=replicas, change=change)


def buffered(**knobs: Any) -> PipeDream:
    return PipeDream("pipedream_2bw", double_buffered=True, **knobs)


def predicting(make: Callable[..., PipeDream], balance: list[int]) -> PipeDream:
    return make(correction="prediction", balance=balance)


def pipemare(balance: list[int]) -> PipeDream:
    return PipeDream(balance=balance, correction="pipemare", discrepancy_decay=0.5, reschedule_updates=4)


MARE = partial(PipeMare, decay=0.5, reschedule=4)
TEXT = Case("gpt2", UNTIED, rates=CHANGING)
ADAMW = replace(TEXT, optimizer="adamw", rates=[rate / 10 for rate in CHANGING])
IN_TWO, IN_FOUR = [2, 3], [1, 1, 2, 1]
ON_TWO = {
    "resnet": trial(RESNET, PipeDream(balance=[3, 3]), [1, 0]),
    "vgg": trial(VGG, PipeDream(balance=[13, 3]), [1, 0]),
    "gpt2": trial(UNTIED, PipeDream(balance=IN_TWO), [1, 0], emptied, rates=CHANGING),
    "gpt2, 2bw": trial(TIED, buffered(balance=IN_TWO), [1, 1], emptied, micro_batch=2, rates=CHANGING),
    "gpt2, bf16, 2bw": trial(TIED, buffered(balance=IN_TWO), [1, 1], micro_batch=2, precision="bf16"),
    "resnet, checkpointed": trial(RESNET, PipeDream(balance=[3, 3]), [1, 0], checkpoint_activations=True),
    "SpecTrain": Trial(TEXT, predicting(PipeDream, IN_TWO), [1, 0], SpecTrain, change=emptied),
    "SpecTrain, images": Trial(Case("vgg", VGG, lr=0.5), predicting(PipeDream, [13, 3]), [1, 0], SpecTrain),
    "SpecTrain, 2bw": Trial(replace(TEXT, model=TIED, micro_batch=2), predicting(buffered, IN_TWO), [1, 1], SpecTrain),
    "XPipe": Trial(ADAMW, predicting(PipeDream, IN_TWO), [1, 0], XPipe),
    "PipeMare": Trial(TEXT, pipemare(IN_TWO), [1, 0], MARE, change=emptied),
}
SLOW_ON_TWO = {
    "vgg, accumulated": trial(VGG, PipeDream(balance=[13, 3]), [1, 0], micro_batch=3),
    "resnet, 2bw": trial(RESNET, buffered(balance=[3, 3]), [1, 1], micro_batch=6),
    "vgg, 2bw": trial(VGG, buffered(balance=[13, 3]), [1, 1], micro_batch=3),
    "resnet, bf16": trial(RESNET, PipeDream(balance=[3, 3]), [1, 0], precision="bf16"),
    "vgg, bf16": trial(VGG, PipeDream(balance=[13, 3]), [1, 0], precision="bf16"),
    "gpt2, checkpointed": trial(UNTIED, PipeDream(balance=IN_TWO), [1, 0], checkpoint_activations=True),
    "resnet, replicas": trial(RESNET, PipeDream(dp=2, balance=[6]), [0], replicas=2),
}
ON_FOUR = {
    "three, two, one, none behind": trial(UNTIED, PipeDream(balance=IN_FOUR), [3, 2, 1, 0]),
    "fewer minibatches than stages": trial(UNTIED, PipeDream(balance=IN_FOUR), [3, 2, 1, 0], steps=2),
    "two micro batches": trial(UNTIED, PipeDream(balance=IN_FOUR), [2, 1, 1, 0], micro_batch=6),
    "2bw": trial(TIED, buffered(balance=IN_FOUR), [1, 1, 1, 1], micro_batch=3),
    "replicas": trial(UNTIED, PipeDream(dp=2, balance=IN_TWO), [1, 0], replicas=2),
    "replicas, 2bw": trial(TIED, buffered(dp=2, balance=IN_TWO), [1, 1], replicas=2, micro_batch=3),
    "images": trial(VGG, PipeDream(balance=[6, 4, 3, 3]), [3, 2, 1, 0]),
    "replicas of images": trial(RESNET, PipeDream(dp=2, balance=[3, 3]), [1, 0], replicas=2),
    "SpecTrain": Trial(TEXT, predicting(PipeDream, IN_FOUR), [3, 2, 1, 0], SpecTrain),
    "XPipe": Trial(ADAMW, predicting(PipeDream, IN_FOUR), [3, 2, 1, 0], XPipe),
    "XPipe, micro batches": Trial(replace(ADAMW, micro_batch=6), predicting(PipeDream, IN_FOUR), [2, 1, 1, 0], XPipe),
    "PipeMare": Trial(TEXT, pipemare(IN_FOUR), [3, 2, 1, 0], MARE),
    "PipeMare, AdamW": Trial(ADAMW, pipemare(IN_FOUR), [3, 2, 1, 0], MARE),
}
FAULTS = {
    "unstashed": trial(UNTIED, PipeDream(balance=IN_TWO), [1, 0], unstashed),
    "rates of another step": trial(UNTIED, PipeDream(balance=IN_TWO), [1, 0], prompt, rates=CHANGING),
    "unstashed, 2bw": trial(TIED, buffered(balance=IN_TWO), [1, 1], unstashed, micro_batch=2),
}
Key = tuple[int, str]  # ranks, trial
TRIALS: dict[Key, Trial] = {(2, name): each for name, each in (ON_TWO | SLOW_ON_TWO | FAULTS).items()}
TRIALS |= {(4, name): each for name, each in ON_FOUR.items()}


def train(keys: Sequence[Key]) -> dict[Key, Outcome]:
    return {key: TRIALS[key].train() for key in keys}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Chosen:
    return Chosen(request, lambda key: key[0], lambda keys: run_ranks(keys[0][0], train, keys)[0])


def is_slow(key: Key) -> bool:
    return key[0] == 4 or key[1] in {*SLOW_ON_TWO, "unstashed, 2bw"}


def assert_differs(outcome: Outcome, expected: Outcome, tolerance: Tolerance) -> None:
    """Else the comparison would pass with this outcome, too."""
    assert distance(outcome.weights, expected) > 2 * tolerance.weights


@for_each([key for key in TRIALS if key[1] not in FAULTS], is_slow)
def test_equals_one_process_with_weights_as_old(key: Key, outcomes: Chosen) -> None:
    """And differs from one with current weights, and from one without the rule."""
    each, outcome = TRIALS[key], outcomes(key)[key]
    tolerance = TOLERANCES[each.case.model.name, each.case.precision]
    assert_equal(outcome, each.expected(), tolerance)
    if each.case.model is TIED:
        assert torch.equal(outcome.weights["embed.wte.weight"], outcome.weights["head.weight"])
    if max(each.staleness) > 0 and each.case.precision == "fp32":
        assert_differs(outcome, each.expected(staleness=[0] * len(each.staleness)), tolerance)
    if each.rules is not no_rule:
        assert_differs(outcome, each.expected(rules=no_rule), tolerance)


@for_each([key for key in TRIALS if key[1] in FAULTS], is_slow)
def test_a_planted_fault_is_noticed(key: Key, outcomes: Chosen) -> None:
    assert_differs(outcomes(key)[key], TRIALS[key].expected(), TOLERANCES["gpt2", "fp32"])


def test_one_stage_is_never_corrected() -> None:
    case = replace(TEXT, optimizer="adamw")
    knobs: list[dict[str, Any]] = [
        {},
        {"correction": "prediction"},
        {"correction": "pipemare", "reschedule_updates": 3},
    ]
    plain, *corrected = run_ranks(1, train_cases, [(case, PipeDream(**each)) for each in knobs])[0]
    for outcome in corrected:
        assert_same_bits(outcome, plain)


def test_predicted_weights_are_nearer_to_those_of_the_update() -> None:
    """The weights that minibatch t sees, against those that its update finds: GPT-2, staleness 3 on all blocks."""
    case = replace(TEXT, steps=12, rates=[], lr=0.01)
    fresh, off = reference(case, 1), dict[str, float]()
    for name, rules in {"none": no_rule, "prediction": SpecTrain}.items():
        off[name] = distance(stale_reference(case, [5], [3], rules=rules).weights, fresh)
    assert off["prediction"] < off["none"], off
