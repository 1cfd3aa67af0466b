"""Blocks that run again and saved tensors that wait on the host change nothing that is trained, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.stages import Plan
from ddlbench.frameworks.single import Single
from ddlbench.job import Framework
from ddlbench.models.gpt2 import GPT2
from ddlbench.recomputation import Choice
from tests.equality.cases import MODELS, RATES
from tests.equality.distances import assert_same_bits
from tests.support.equal import train_cases
from tests.support.jobs import two_ranks
from tests.support.ranks import run_ranks
from tests.support.reference import Case
from tests.support.strategies import strategies

TEXT = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.3)
Form = tuple[Choice, Choice]  # checkpoint_activations, offload_activations
AGAIN: list[Form] = [(True, False), ("selective", False), ("every:2", False)]
AGAIN_IN_SOME: dict[str, list[Form]] = {
    "resnet": [(["stem"], False), ("budget:0.013", False)],
    "gpt2": [(["h0"], False), ("budget:0.0002", False)],
}
ON_HOST: dict[str, list[Form]] = {
    "resnet": [(False, True), (["layer1_0"], ["stem"]), ("budget:0.013", "budget:0.013")],
    "gpt2": [(False, True), (False, "budget:0.00034"), (["h1"], True)],
}
RECOMPUTED = {model: AGAIN + some for model, some in AGAIN_IN_SOME.items()}
FORMS = {"again": RECOMPUTED, "host": ON_HOST}
TRAINED = [
    (1, Single(), "again"), (1, Single(), "host"), (2, DDP(), "host"),
    *(pytest.param(2, *each, marks=pytest.mark.slow) for each in (
        (DDP(), "again"), (FSDP(), "host"), (DeepSpeed(zero_stage=2), "host"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("world", "framework", "forms"), TRAINED, ids=lambda value: getattr(value, "name", None))
def test_every_form_trains_the_same_to_the_bit(world: int, framework: Framework, forms: str) -> None:
    cases: list[Case] = []
    for name, chosen in FORMS[forms].items():
        plain = Case(name, TEXT if name == "gpt2" else MODELS[name], micro_batch=3, steps=2, global_batch=6 * world)
        cases.append(plain)
        cases += [replace(plain, checkpoint_activations=again, offload_activations=host) for again, host in chosen]
    result = run_ranks(world, train_cases, [(case, framework) for case in cases])[0]
    plain = {case.name: each for case, each in zip(reversed(cases), reversed(result), strict=True)}
    for case, outcome in zip(cases, result, strict=True):
        assert_same_bits(outcome, plain[case.name], case)


@pytest.mark.slow
def test_stages_within_a_budget_train_the_same_to_the_bit() -> None:
    """The first stage of 1F1B has two micro batches in memory, the last has one: only the first runs blocks again."""
    framework, model, budget = Pipeline(schedule="1f1b", balance=[3, 4]), replace(TEXT, n_layer=4), "budget:0.0004"
    this = two_ranks(model=model, checkpoint_activations=budget, global_batch=8)
    first, last = Plan(replace(this, micro_batch=2), [2, 1], 2, framework).segments
    assert "h0" not in first
    assert {"h2", "h3"} <= {item for item in last if isinstance(item, str)}
    case = Case("gpt2", model, micro_batch=2, steps=2, global_batch=8)
    cases = [replace(case, checkpoint_activations=form) for form in (False, budget)]
    plain, within = run_ranks(2, train_cases, [(one, framework) for one in cases])[0]
    assert_same_bits(within, plain)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet", "gpt2"])
def test_selective_trains_the_same_to_the_bit_in_every_framework(model: str) -> None:
    given = TEXT if model == "gpt2" else MODELS[model]
    case = Case(f"{model}-whole", given, checkpoint_activations="selective", steps=2, lr=RATES[model])
    trained = strategies(2, case)
    cases = [replace(case, checkpoint_activations=form) for form in (False, "selective")]
    result = run_ranks(2, train_cases, [(one, strategy.framework) for strategy in trained for one in cases])[0]
    for strategy, plain, selective in zip(trained, result[::2], result[1::2], strict=True):
        assert_same_bits(selective, plain, strategy)
