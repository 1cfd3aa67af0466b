"""Corrections of old weights: pipelines against one plain process that follows the papers' rules (support/corrections);
what they are worth; refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.pipeline.weights import PredictedWeights, UnstashedWeights, Weights
from ddlbench.job import Job
from tests.equality.distances import assert_equal, assert_same_bits, distance
from tests.frameworks.pipeline.old_weights import CHANGING, TIED, UNTIED, VGG, Trial, no_rule, of
from tests.support.broken import Emptied
from tests.support.corrections import PipeMare, SpecTrain, XPipe
from tests.support.equal import make_job, ready, train_cases
from tests.support.jobs import refused, wrong_knob
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome, reference, stale_reference


class Doubled(nn.Module):
    """x -> w x + w x, with one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.other.weight = self.one.weight
        nn.init.constant_(self.one.weight, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


def test_a_version_keeps_its_weights_while_the_newest_move_on() -> None:
    model = Doubled()
    weights = Weights(model)
    optimizer = torch.optim.SGD(weights.newest.values(), lr=1.0)
    old = weights.version(optimizer, [])
    weights.use(old)
    loss = model(torch.ones(1, 1)).square().sum()  # (2 w)^2 = 36

    weights.copy_newest()
    (newest,) = weights.newest.values()
    newest.grad = torch.full_like(newest, 2.0)
    optimizer.step()  # 3 - 2
    loss.backward()
    (stale,) = old.values()
    assert (newest.item(), stale.item()) == (1.0, 3.0)
    assert stale.grad is not None
    assert stale.grad.item() == 24.0  # d (2 w)^2 / dw = 8 w at w = 3

    weights.take_gradients(old)
    optimizer.step()
    assert newest.item() == -23.0
    assert stale.grad is None
    weights.use(weights.newest)
    assert model(torch.ones(1, 1)).item() == -46.0
    assert model.one.weight is model.other.weight is newest


def test_memory_is_shared_until_the_newest_part() -> None:
    weights = Weights(Doubled())
    (newest,) = weights.newest.values()
    optimizer = torch.optim.SGD([newest], lr=1.0)
    (first,), (second,) = (weights.version(optimizer, []).values() for _ in range(2))
    assert first.data_ptr() == second.data_ptr() == newest.data_ptr()
    weights.copy_newest()
    assert first.data_ptr() == second.data_ptr() != newest.data_ptr()


TEXT = Case("gpt2", UNTIED, lr=0.02, rates=CHANGING)
IMAGES = Case("vgg", VGG, lr=0.5)
ADAMW = replace(TEXT, optimizer="adamw", rates=[rate / 10 for rate in CHANGING])


def predicting(name: str = "pipedream", **knobs: Any) -> PipeDream:
    return PipeDream(name, name == "pipedream_2bw", correction="prediction", **knobs)


def pipemare(
    balance: list[int], decay: float = 0.5, reschedule: int = 4, kind: type[PipeDream] = PipeDream
) -> PipeDream:
    return kind(balance=balance, correction="pipemare", discrepancy_decay=decay, reschedule_updates=reschedule)


MARE = partial(PipeMare, decay=0.5, reschedule=4)
TWO = {
    "SpecTrain": Trial(TEXT, Emptied(balance=[2, 3], correction="prediction"), [1, 0], SpecTrain),
    "SpecTrain, images": Trial(IMAGES, predicting(balance=[13, 3]), [1, 0], SpecTrain),
    "SpecTrain, 2bw": Trial(
        replace(TEXT, model=TIED, micro_batch=2), predicting("pipedream_2bw", balance=[2, 3]), [1, 1], SpecTrain
    ),
    "XPipe": Trial(ADAMW, predicting(balance=[2, 3]), [1, 0], XPipe),
    "PipeMare": Trial(TEXT, pipemare([2, 3], kind=Emptied), [1, 0], MARE),
}
FOUR = {
    "SpecTrain": Trial(TEXT, predicting(balance=[1, 1, 2, 1]), [3, 2, 1, 0], SpecTrain),
    "XPipe": Trial(ADAMW, predicting(balance=[1, 1, 2, 1]), [3, 2, 1, 0], XPipe),
    "XPipe, micro batches": Trial(replace(ADAMW, micro_batch=6), predicting(balance=[1, 1, 2, 1]), [2, 1, 1, 0], XPipe),
    "PipeMare": Trial(TEXT, pipemare([1, 1, 2, 1]), [3, 2, 1, 0], MARE),
    "PipeMare, AdamW": Trial(ADAMW, pipemare([1, 1, 2, 1]), [3, 2, 1, 0], MARE),
}


@cache
def trained(ranks: int) -> dict[str, Outcome]:
    trials = TWO if ranks == 2 else FOUR
    work = [(each.case, each.framework) for each in trials.values()]
    return dict(zip(trials, run_ranks(ranks, train_cases, work)[0], strict=True))


TRIALS = [
    *(pytest.param(2, name, id=f"2-{name}") for name in TWO),
    *(pytest.param(4, name, id=f"4-{name}", marks=pytest.mark.slow) for name in FOUR),
]


@pytest.mark.parametrize(("ranks", "name"), TRIALS)
def test_trains_by_the_rule(ranks: int, name: str) -> None:
    each = (TWO if ranks == 2 else FOUR)[name]
    assert_equal(trained(ranks)[name], each.expected(), each.tolerance)
    each.assert_differs(trained(ranks)[name], each.expected(rules=no_rule))


@pytest.mark.parametrize("correction", ["prediction", "pipemare"])
def test_one_stage_is_never_corrected(correction: str) -> None:
    case = replace(TEXT, optimizer="adamw")
    plain, corrected = run_ranks(
        1, train_cases, [(case, PipeDream()), (case, PipeDream(correction=correction, reschedule_updates=3))]
    )[0]
    assert_same_bits(corrected, plain)


def test_predicted_weights_are_nearer_to_those_of_the_update() -> None:
    """The weights that minibatch t sees, against those that its update finds: GPT-2, staleness 3 on all blocks."""
    case = replace(TEXT, steps=12, rates=[], lr=0.01)
    fresh, off = reference(case, 1), dict[str, float]()
    for name, rules in {"none": no_rule, "prediction": SpecTrain}.items():
        off[name] = distance(stale_reference(case, [5], [3], rules=rules).weights, fresh)
    assert off["prediction"] < off["none"], off


class Quadratic(nn.Module):
    """f(w) = a w^2 / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([4.0], dtype=torch.float64))


def test_a_worked_prediction() -> None:
    """Momentum 0.5: after gradients 2 and 3 the buffer is 0.5 * 2 + 3 = 4; two updates at 0.1 and 0.2 are to come."""
    model = Quadratic()
    weights, optimizer = PredictedWeights(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    (before,) = weights.version(optimizer, [0.1]).values()
    assert (before.item(), before.data_ptr() == model.w.data_ptr()) == (4.0, False)
    for gradient in (2.0, 3.0):
        model.w.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
    (after,) = weights.version(optimizer, [0.1, 0.2]).values()
    assert after.item() == pytest.approx(4.0 - 0.1 * (2 + 4) - (0.1 + 0.2) * 4)
    address = model.w.data_ptr()
    weights.copy_newest()
    assert model.w.data_ptr() == address, "no version has the memory of the newest weights"
    weights.version(optimizer, [])
    weights.copy_newest()
    assert model.w.data_ptr() != address


def test_a_worked_correction() -> None:
    """Two updates of -1 and -2, n = 2, D = 0.25, so g = 0.5: d = 0.5 * (0.5 * -1) + 0.5 * -2 = -1.25."""
    model = Quadratic()
    weights = UnstashedWeights(model, delay=2, decay=0.25, reschedule_updates=4)
    for change in (1.0, 2.0):
        with weights.updating(in_flight=True):
            model.w.data -= change
    assert weights.state()["velocity/w"].item() == -1.25
    with weights.backward(age=2):
        assert model.w.item() == 1.0 + 2 * 1.25
    assert model.w.item() == 1.0
    assert [weights.rate(0.1, updates) for updates in (0, 2, 4, 9)] == pytest.approx([0.05, 0.1 / 2**0.5, 0.1, 0.1])
    assert UnstashedWeights(model, 2, 0.25, 0).rate(0.1, 0) == 0.1


@pytest.mark.parametrize(
    ("layer", "value"),
    [
        (nn.Linear(3, 2), torch.randn(4, 3)),
        (nn.Conv2d(3, 2, 3), torch.randn(4, 3, 5, 5)),
        (nn.LayerNorm(3), torch.randn(4, 3)),
        (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)),
    ],
    ids=["linear", "convolution", "layer norm", "batch norm"],
)
def test_a_backward_pass_sees_the_corrected_weights(layer: nn.Module, value: Tensor) -> None:
    """A layer is linear in its weight (with the bias it is affine), so the gradient of its input depends on the weight
    that the backward pass sees, and on no other: it is that of a plain pass with this weight."""
    weights = UnstashedWeights(layer, delay=1, decay=0.5, reschedule_updates=0)
    for velocity in weights.velocity.values():
        velocity.normal_()
    upstream = torch.randn(layer(value).shape)
    version = weights.version(torch.optim.SGD(layer.parameters(), lr=0.1), [])
    weights.use(version)
    given = value.clone().requires_grad_()
    output = layer(given)
    with weights.backward(age=1):
        output.backward(upstream)
    plain = value.clone().requires_grad_()
    corrected = {name: weight - weights.velocity[name] for name, weight in weights.newest.items()}
    torch.func.functional_call(layer, corrected, (plain,)).backward(upstream)
    assert given.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(given.grad, plain.grad)


def test_pipemare_keeps_one_set_of_weights() -> None:
    facts = run_ranks(2, look)[0]
    assert facts["weight_versions"] == [1, 1]
    assert facts["correction"] == "pipemare"


def look() -> dict[str, Any]:
    with ready(pipemare([2, 3]), make_job(TEXT)) as (trainer, _):
        assert isinstance(trainer.weights, UnstashedWeights) == (trainer.job.rank == 0), "the last stage is never late"
        assert any(name.startswith("velocity/") for name in trainer.live().rank_tensors) == (trainer.job.rank == 0)
        return trainer.facts()


def with_optimizer(given: Job, optimizer: Callable[..., torch.optim.Optimizer]) -> Job:
    return replace(given, optimizer=lambda named: optimizer([weight for _, weight in named], lr=0.1))


@pytest.mark.parametrize(
    ("framework", "given", "says"),
    [
        (predicting(), with_optimizer(of(2), torch.optim.SGD), r"=prediction: without momentum .*choose sgd with mom"),
        (predicting(), with_optimizer(of(2), torch.optim.RMSprop), r"=prediction: there is no rule for RMSprop"),
        (pipemare([8, 8]), of(2, precision="bf16"), r"=pipemare: in bf16 .*set train\.precision=fp32"),
        (pipemare([8, 8]), of(2, micro_batch=6), r"weights of several ages: set train\.micro_batch=null"),
        (pipemare([8, 8]), of(2, checkpoint_activations=True), r"set train\.checkpoint_activations=false"),
        (
            PipeDream("pipedream_2bw", True, correction="pipemare"), of(2, micro_batch=6),
            r"keeps the weights of the forward pass .*use framework=pipedream",
        ),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused_before_anything_starts(framework: PipeDream, given: Job, says: str) -> None:
    refused(framework, given, says)


def test_wrong_knobs_are_named() -> None:
    wrong_knob(PipeDream, r"framework\.correction=guess", correction="guess")
    wrong_knob(PipeDream, r"framework\.discrepancy_decay=1\.0", discrepancy_decay=1.0)
    wrong_knob(PipeDream, r"framework\.reschedule_updates=-1", reschedule_updates=-1)
