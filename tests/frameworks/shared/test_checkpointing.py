"""Blocks give the same results, to the bit, with and without activation checkpointing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ddlbench.errors import Unsupported
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.stages import Plan
from ddlbench.frameworks.shared import checkpointing
from ddlbench.frameworks.shared.checkpointing import (
    checkpoint_blocks,
    facts_of_model,
    keep_costly_outputs,
    replica_plan,
)
from ddlbench.frameworks.single import Single
from ddlbench.job import Job, Model
from ddlbench.measure.formulas.flops import is_costly, training_flops
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.vgg import VGG
from ddlbench.recomputation import Choice, Names, instants, named, plan_of, repeats
from ddlbench.texts import GIB
from tests.support.jobs import MODEL, job

TEXT = GPT2("gpt2", n_layer=3, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.3)
IN_PLACE = VGG("vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7)
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


def passes(model: Model, change: Callable[[nn.Sequential], None]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and buffers after two passes."""
    torch.manual_seed(0)
    network = model.build()
    change(network)
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
    plain = passes(TRAINED[kind], lambda _: None)
    for segments in forms:
        assert segments != names
        for one, two in zip(plain, passes(TRAINED[kind], partial(checkpoint_blocks, segments=segments)), strict=True):
            assert all(map(torch.equal, one, two)), segments


@pytest.mark.parametrize("model", [MODEL, TEXT, IN_PLACE], ids=lambda model: model.name)
def test_cheap_operators_that_run_again_change_nothing_but_memory(model: Model) -> None:
    """VGG's ReLU overwrites the output of a convolution, unless that is kept."""
    plain, selective = passes(model, lambda _: None), passes(model, keep_costly_outputs)
    for one, two in zip(plain, selective, strict=True):
        assert all(map(torch.equal, one, two))


class Calls(TorchDispatchMode):
    """How often each operator is called."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.numbers[func] += 1
        return func(*args, **(kwargs or {}))


def backward_calls(model: Model, change: Callable[[nn.Sequential], None]) -> tuple[Counter[Any], Counter[Any]]:
    """The costly and the cheap operators of a backward pass."""
    network = model.build()
    change(network)
    inputs = torch.zeros(2, *model.input_shape(), dtype=torch.int64 if model.kind == "text" else torch.float32)
    result = network(inputs).sum()
    with Calls() as calls:
        result.backward()
    costly = Counter({func: number for func, number in calls.numbers.items() if is_costly(func)})
    return costly, calls.numbers - costly


@pytest.mark.parametrize("model", [MODEL, replace(TEXT, dropout=0.0)], ids=lambda model: model.name)
def test_no_costly_operator_runs_again(model: Model) -> None:
    (costly, cheap), (same, more) = backward_calls(model, lambda _: None), backward_calls(model, keep_costly_outputs)
    assert same == costly
    aten = torch.ops.aten
    first, times = (aten.native_layer_norm.default, 6) if model is not MODEL else (aten.convolution.default, 0)
    assert (more - cheap)[first] == times
    assert sum((more - cheap).values()) > 0
    assert training_flops(model, keep_costly_outputs) == training_flops(model)


class Noise(nn.Sequential):
    """Draws numbers twice, the second time for dropout."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(super().forward(input * torch.rand_like(input)), 0.5)


def test_what_follows_a_kept_operator_that_draws_numbers_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention with dropout does on a GPU: its second run draws none."""
    kept = torch.ops.aten.rand_like.default
    monkeypatch.setattr(checkpointing, "is_costly", lambda func: func is kept or is_costly(func))

    def gradient(change: Callable[[nn.Sequential], None]) -> Tensor | None:
        torch.manual_seed(0)
        network = nn.Sequential(Noise(nn.Linear(8, 8)))
        change(network)
        network(torch.ones(4, 8)).square().sum().backward()
        return next(network.parameters()).grad

    plain, selective = gradient(lambda _: None), gradient(keep_costly_outputs)
    assert plain is not None
    assert selective is not None
    assert torch.equal(plain, selective)


@pytest.mark.parametrize("form", [True, "every:2", "budget"])
def test_flops_of_the_second_runs_are_as_counted(form: Choice) -> None:
    """By torch's own counter over real passes; by the plan up to products that no backward pass needs: the head, and
    the last one of a segment."""
    this = given("dropout", form)
    segments = segments_of(this)
    assert training_flops(TEXT, lambda _: None) == training_flops(TEXT)
    network = TEXT.build()
    checkpoint_blocks(network, segments)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    counted = training_flops(TEXT, partial(checkpoint_blocks, segments=segments))
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


def test_a_model_says_what_was_done_to_it() -> None:
    network = MODEL.build()
    names = [name for name, _ in network.named_children()]
    checkpoint_blocks(network, [*names])
    assert facts_of_model(network) == {}
    checkpoint_blocks(network, [[names[0]], *names[1:]])
    assert facts_of_model(network)["segments"][0] == [names[0]]


def test_selective_is_recorded_with_the_blocks_that_have_several_layers() -> None:
    network = TEXT.build()
    keep_costly_outputs(network)
    names = ["embed", "h0", "h1", "h2"]
    assert facts_of_model(network) == {"selective": names}
    stages = Plan(given("dropout", "selective"), [1, 1], 2, Pipeline(balance=[3, 3]))
    assert stages.facts()["selective"] == names
