"""Blocks give the same results, to the bit, with and without activation checkpointing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ddlbench.activation_memory import instants
from ddlbench.errors import Unsupported
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.stages import Plan
from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks, facts_of_model, replica_plan
from ddlbench.frameworks.single import Single
from ddlbench.job import Job, Model
from ddlbench.measure.formulas.flops import hardware_flops, training_flops
from ddlbench.models.gpt2 import GPT2
from ddlbench.recomputation import Choice, Names, named, plan_of, repeats
from ddlbench.texts import GIB
from tests.equality.cases import MODELS
from tests.support.equal import train_cases
from tests.support.jobs import MODEL, job
from tests.support.ranks import run_ranks
from tests.support.reference import Case

TEXT = GPT2("gpt2", n_layer=3, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.3)
TRAINED: dict[str, Model] = {"batch norm": MODEL, "dropout": TEXT}
BUDGET = {"batch norm": "budget:0.009", "dropout": "budget:0.0003"}  # some blocks run again
FORMS: list[Choice] = [True, "every:2", "every:9", "names", "budget"]


def given(kind: str, form: Choice) -> Job:
    """With samples of one micro batch."""
    model = TRAINED[kind]
    names = [name for name, _ in model.build().named_children()]
    chosen = {"names": names[1:3], "budget": BUDGET[kind]}.get(str(form), form)
    return replace(job(), model=model, checkpoint_activations=chosen, global_batch=4, micro_batch=4)


def segments_of(this: Job) -> Names:
    names, plan = replica_plan(this, 1)
    return named(plan, names)


def passes(model: Model, segments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and buffers after two passes."""
    torch.manual_seed(0)
    network = model.build()
    checkpoint_blocks(network, segments)
    inputs = torch.randint(0, 61, (4, 16)) if model.kind == "text" else torch.randn(4, *model.input_shape())
    for _ in range(2):
        network(inputs).square().mean().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return gradients, list(network.buffers())  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("kind", TRAINED)
def test_checkpointing_changes_nothing_but_memory(kind: str) -> None:
    """Also in segments within segments. BatchNorm counts once however often it runs, and dropout draws the same."""
    names = [name for name, _ in TRAINED[kind].build().named_children()]
    forms = [segments_of(given(kind, form)) for form in FORMS]
    forms.append([[[[names[0]], names[1]], [names[2]], names[3]], *names[4:]])
    plain = passes(TRAINED[kind], names)
    for segments in forms:
        assert segments != names
        for one, two in zip(plain, passes(TRAINED[kind], segments), strict=True):
            assert all(map(torch.equal, one, two)), segments


@pytest.mark.parametrize("form", [True, "every:2", "budget"])
def test_flops_of_the_second_runs_are_as_counted(form: Choice) -> None:
    """By torch's own counter over real passes; by the plan up to products that no backward pass needs: the head, and
    the last one of a segment."""
    this = given("dropout", form)
    segments = segments_of(this)
    assert hardware_flops(TEXT, lambda _: None) == training_flops(TEXT)
    network = TEXT.build()
    checkpoint_blocks(network, segments)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    counted = hardware_flops(TEXT, partial(checkpoint_blocks, segments=segments))
    assert counter.get_total_flops() in (2 * counted, pytest.approx(2 * counted, rel=0.06))  # attention of the CPU
    assert this.links is not None
    links = this.links(this, 4)
    plan = plan_of(this.checkpoint_activations, [name for name, _ in network.named_children()], lambda: links)
    again = sum(times * link.flops / 4 for times, link in zip(repeats(plan), links, strict=True))
    head = links[-1].flops / 4 if form != "budget" else 0.0
    assert counted - training_flops(TEXT) == pytest.approx(again - head, rel=1e-6)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_budget_is_kept(kind: str) -> None:
    this = given(kind, "budget")
    assert this.links is not None
    links, names = this.links(this, 4), [name for name, _ in this.model.build().named_children()]
    plan = plan_of(this.checkpoint_activations, names, lambda: links)
    assert max(run.bytes_ for run in instants(plan, links)) <= float(BUDGET[kind].removeprefix("budget:")) * GIB
    assert {0, 1} <= set(repeats(plan))


def test_what_cannot_be_checkpointed_is_refused_before_anything_starts() -> None:
    with pytest.raises(Unsupported, match=r"the model has no block h9: its blocks are stem, "):
        Single().check(replace(job(), checkpoint_activations=["h9"]))
    with pytest.raises(Unsupported, match=r"budget:1e-6: no set of blocks fits: the least for stem to .* is .* GiB"):
        Single().check(replace(job(), checkpoint_activations="budget:1e-6"))


def trained(name: str, model: Model, world: int, forms: list[Choice]) -> list[Case]:
    one = Case(name, model, micro_batch=3, steps=2, global_batch=6 * world)
    return [replace(one, checkpoint_activations=form) for form in (False, True, "every:2", *forms)]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_form_trains_the_same_to_the_bit(world: int) -> None:
    framework = Single() if world == 1 else DDP()
    cases = [
        *trained("resnet", MODELS["resnet"], world, [["stem"], "budget:0.013"]),
        *trained("gpt2", replace(TEXT, n_layer=2), world, [["h0"], "budget:0.0002"]),
    ]
    result = run_ranks(world, train_cases, [(case, framework) for case in cases])[0]
    plain = {case.name: outcome for case, outcome in zip(cases, result, strict=True) if not case.checkpoint_activations}
    for case, outcome in zip(cases, result, strict=True):
        expected = plain[case.name]
        assert outcome.losses == expected.losses, case
        assert all(torch.equal(outcome.weights[key], expected.weights[key]) for key in expected.weights), case


@pytest.mark.slow
def test_stages_within_a_budget_train_the_same_to_the_bit() -> None:
    """The first stage of 1F1B has two micro batches in memory, the last has one: only the first runs blocks again."""
    framework, model, budget = Pipeline(schedule="1f1b", balance=[3, 4]), replace(TEXT, n_layer=4), "budget:0.0004"
    this = replace(job(), model=model, checkpoint_activations=budget, global_batch=8, micro_batch=2, world_size=2)
    first, last = Plan(this, [2, 1], 2, framework).segments
    assert "h0" not in first
    assert {"h2", "h3"} <= {item for item in last if isinstance(item, str)}
    case = Case("gpt2", model, micro_batch=2, steps=2, global_batch=8)
    cases = [replace(case, checkpoint_activations=form) for form in (False, budget)]
    plain, within = run_ranks(2, train_cases, [(one, framework) for one in cases])[0]
    assert within.losses == plain.losses
    assert all(torch.equal(within.weights[key], tensor) for key, tensor in plain.weights.items())


def test_a_model_says_what_was_done_to_it() -> None:
    network = MODEL.build()
    names = [name for name, _ in network.named_children()]
    checkpoint_blocks(network, [*names])
    assert facts_of_model(network) == {}
    checkpoint_blocks(network, [[names[0]], *names[1:]])
    assert facts_of_model(network)["segments"][0] == [names[0]]
