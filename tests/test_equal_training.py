"""The central test: every framework trains what one plain process trains (docs/adr/0001)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.pipeline import Pipeline
from ddlbench.frameworks.single import Single
from ddlbench.job import Framework, Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.equal import train_cases
from tests.ranks import run_ranks
from tests.reference import Case, Outcome, reference

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


PIPELINES: dict[str, Framework] = {
    "gpipe": Pipeline(),
    "1f1b": Pipeline(schedule="1f1b"),
    "interleaved": Pipeline(schedule="interleaved", virtual_stages=2),
    "zero_bubble": Pipeline(schedule="zero_bubble"),
}


def frameworks(world: int) -> dict[str, Framework]:
    if world == 1:
        return {"single": Single(), "ddp": DDP()}
    return {"ddp": DDP(), **(PIPELINES if world == 2 else {"gpipe": Pipeline()})}


def supported(case: Case, name: str) -> bool:
    return not (name == "zero_bubble" and case.checkpoint_activations)


def work(world: int) -> list[tuple[str, str]]:
    """Case and framework of each training."""
    return [(case.name, name) for case in CASES for name in frameworks(world) if supported(case, name)]


@cache
def expected(case_name: str, data_size: int, micro_batch: int | None) -> Outcome:
    (case,) = (case for case in CASES if case.name == case_name)
    return reference(replace(case, micro_batch=micro_batch), data_size)


def expected_of(framework: Framework, case: Case, world: int) -> Outcome:
    """Data parallel: a replica a rank, its whole slice at once. A pipeline: one replica, cut into as many micro batches
    as divide its 12 samples, at most 4 a rank."""
    if isinstance(framework, Pipeline):
        return expected(case.name, 1, case.micro_batch or {2: 2, 3: 1}[world])
    return expected(case.name, world, case.micro_batch)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda world: f"{world}-ranks")
def outcomes(request: pytest.FixtureRequest) -> Iterator[tuple[int, dict[tuple[str, str], Outcome]]]:
    """Every case of every framework at one world size, trained in one set of processes."""
    world = request.param
    cases = {case.name: case for case in CASES}
    trainings = [(cases[case], frameworks(world)[name]) for case, name in work(world)]
    ranks = run_ranks(world, train_cases, trainings)
    return world, dict(zip(work(world), ranks[0], strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_one_plain_process(case: Case, outcomes: tuple[int, dict[tuple[str, str], Outcome]]) -> None:
    world, found = outcomes
    for name, framework in frameworks(world).items():
        if supported(case, name):
            expected = expected_of(framework, case, world)
            assert_equal(found[case.name, name], expected, TOLERANCES[case.model.name, case.precision])


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
