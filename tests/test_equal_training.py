"""The central test: every framework trains what one plain process trains (docs/adr/0001)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch

from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.equal import train_cases
from tests.ranks import run_ranks
from tests.reference import Case, Outcome, reference
from tests.strategies import strategies

MODELS: dict[str, Model] = {
    "resnet": ResNet(name="resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=64, num_classes=7),
    "vgg": VGG(name="vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7, dropout=0.0),
    "gpt2": GPT2(name="gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0),
}

# BatchNorm and ReLU make a ResNet sensitive to its last bits: small steps keep it where rounding does not grow.
RATES = {"resnet": 1e-4, "vgg": 0.02, "gpt2": 0.02}

CASES = [
    Case(f"{model}-{precision}-{'accumulated' if micro else 'whole'}", MODELS[model], precision, micro, lr=RATES[model])
    for model in MODELS
    for precision in ("fp32", "bf16")
    for micro in (None, 2)
] + [
    Case(f"{model}-checkpointed-clipped", MODELS[model], clip_norm=0.5, checkpoint_activations=True, lr=RATES[model])
    for model in MODELS
]


@dataclass(frozen=True)
class Tolerance:
    """loss: largest difference at any update and in validation. weights: the distance between both final weights as
    a share of the way they came; a gradient twice too large is off by 1, one micro batch of six dropped by 1/6."""

    loss: float
    weights: float


# fp32: sums in another order. bf16: a weight that differs in its last bits may round the other way; in a ResNet, where
# BatchNorm carries that far, bf16 can only show gross faults, and fp32 shows the others.
TOLERANCES = {
    ("resnet", "fp32"): Tolerance(1e-4, 0.02),
    ("resnet", "bf16"): Tolerance(2e-2, 0.4),
    ("vgg", "fp32"): Tolerance(1e-5, 1e-4),
    ("vgg", "bf16"): Tolerance(5e-3, 0.02),
    ("gpt2", "fp32"): Tolerance(1e-5, 1e-4),
    ("gpt2", "bf16"): Tolerance(5e-3, 0.02),
}


# Of every framework. The other cases and more ranks are for the long tests.
QUICK = {"resnet-fp32-whole", "vgg-fp32-whole", "gpt2-fp32-whole", "gpt2-bf16-accumulated"}


# The stages share much of their code: beyond plain fp32 the quick tests try one of them a case.
QUICK_ZERO = {("gpt2-bf16-accumulated", "zero3"), ("resnet-checkpointed-clipped", "zero2")}


def is_slow(world: int, case: Case, name: str) -> bool:
    if name in ZERO and not case.name.endswith("fp32-whole") and (case.name, name) not in QUICK_ZERO:
        return True
    return world > 2 or case.name not in QUICK


def names(world: int, case: Case, slow: bool) -> list[str]:
    return [name for name in frameworks(world) if is_slow(world, case, name) == slow]


def at(world: int, case: Case) -> Case:
    """Six samples a rank: they divide into the same micro batches at any number of ranks."""
    return replace(case, global_batch=6 * world)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str], Outcome]:
    """The quick or the slow trainings at one world size, all in one set of processes."""
    world, slow = request.param
    cases = [at(world, case) for case in CASES if is_slow(world, case) == slow]
    work = {
        (case.name, strategy.name): (case, strategy.framework) for case in cases for strategy in strategies(world, case)
    }
    return dict(zip(work, run_ranks(world, train_cases, list(work.values()), timeout_s=600)[0], strict=True))


TRAININGS = [
    pytest.param(
        (world, slow),
        world,
        slow,
        case,
        id=f"{world}-ranks-{case.name}{'-rest' if slow else ''}",
        marks=[pytest.mark.slow, pytest.mark.timeout(1000)] if slow else [],
    )
    for world in (1, 2, 3, 4)
    for slow in (False, True)
    for case in CASES
    if names(world, case, slow)
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("outcomes", "world", "case"), TRAININGS, indirect=["outcomes"])
def test_equals_one_plain_process(outcomes: dict[tuple[str, str], Outcome], world: int, case: Case) -> None:
    plain = cache(partial(plain_process, at(world, case)))
    unequal: dict[str, str] = {}
    for strategy in strategies(world, case):
        expected = plain(strategy.replicas, strategy.micro_batch)
        try:
            assert_equal(outcomes[case.name, strategy.name], expected, TOLERANCES[case.model.name, case.precision])
        except AssertionError as error:
            unequal[strategy.name] = str(error)
    assert not unequal, "\n".join(f"{name}: {text}" for name, text in unequal.items())


def plain_process(case: Case, replicas: int, micro_batch: int | None) -> Outcome:
    """micro_batch counts where the case gives none."""
    return reference(replace(case, micro_batch=case.micro_batch or micro_batch), replicas)


def assert_equal(found: Outcome, expected: Outcome, tolerance: Tolerance) -> None:
    assert found.updates == expected.updates
    assert found.losses == pytest.approx(expected.losses, abs=tolerance.loss)
    assert found.weights.keys() == expected.weights.keys()
    assert distance(found.weights, expected) <= tolerance.weights
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=tolerance.loss, abs=tolerance.loss), name


def distance(weights: Mapping[str, torch.Tensor], expected: Outcome) -> float:
    """|found - expected| / |expected - start| over all parameters, running statistics weighed apart from them."""
    shares: list[float] = []
    for statistics in (False, True):
        names = [
            name
            for name, weight in weights.items()
            if weight.is_floating_point() and ("running_" in name) == statistics
        ]
        if names:
            off = norm([weights[name] - expected.weights[name] for name in names])
            shares.append(off / norm([expected.weights[name] - expected.start[name] for name in names]))
    return max(shares)


def norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())
