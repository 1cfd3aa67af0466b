"""The central test: every framework trains what one plain process trains (docs/adr/0001)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from ddlbench.record.run_json import weights_hash
from tests.support.equal import train_cases
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome, reference
from tests.support.strategies import Strategy, strategies

MODELS: dict[str, Model] = {
    "resnet": ResNet(name="resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=64, num_classes=7),
    "vgg": VGG(name="vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7, dropout=0.0),
    "gpt2": GPT2(name="gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0),
}

# BatchNorm and ReLU make a ResNet sensitive to its last bits: small steps keep it where rounding does not grow, and
# from this seed no unit sits so close to zero that the order of a sum would switch it early on (seen: up to 5e-2 of the
# way from other seeds, 9e-3 from this one).
RATES = {"resnet": 1e-5, "vgg": 0.02, "gpt2": 0.02}
SEEDS = {"resnet": 6, "vgg": 3, "gpt2": 3}

CASES = (
    [
        Case(
            f"{model}-{precision}-{'accumulated' if micro else 'whole'}",
            MODELS[model],
            precision,
            micro,
            lr=RATES[model],
            seed=SEEDS[model],
        )
        for model in MODELS
        for precision in ("fp32", "bf16")
        for micro in (None, 2)
    ]
    + [
        Case(
            f"{model}-checkpointed-clipped",
            MODELS[model],
            clip_norm=0.5,
            checkpoint_activations=True,
            lr=RATES[model],
            seed=SEEDS[model],
        )
        for model in MODELS
    ]
    + [
        Case("gpt2-padded", replace(MODELS["gpt2"], pad_vocab_to_multiple=8), lr=RATES["gpt2"])  # pyright: ignore
    ]
)


@dataclass(frozen=True)
class Tolerance:
    """loss: largest difference at any update and in validation. weights: the distance between both final weights as
    a share of the way they came; a gradient twice too large is off by 1, one micro batch of six dropped by 1/6."""

    loss: float
    weights: float


# fp32: sums in another order. bf16: a weight that differs in its last bits may round the other way; in a ResNet, where
# BatchNorm carries that far, bf16 can only show gross faults, and fp32 shows the others.
TOLERANCES = {
    ("resnet", "fp32"): Tolerance(1e-5, 0.02),
    ("resnet", "bf16"): Tolerance(2e-2, 0.3),
    ("vgg", "fp32"): Tolerance(1e-5, 1e-4),
    ("vgg", "bf16"): Tolerance(5e-3, 0.02),
    ("gpt2", "fp32"): Tolerance(1e-5, 1e-4),
    ("gpt2", "bf16"): Tolerance(5e-3, 0.02),
}


# The other cases and more ranks are for the long tests.
QUICK = {"resnet-fp32-whole", "vgg-fp32-whole", "gpt2-fp32-whole"}
QUICK_OF_THE_BASES = {"gpt2-bf16-accumulated", "resnet-checkpointed-clipped"}
BASES = {"single", "ddp"}


def is_quick(world: int, case: Case, strategy: Strategy) -> bool:
    quick = QUICK | (QUICK_OF_THE_BASES if strategy.name in BASES else set())
    return world <= 2 and case.name in quick


def strategies_of(world: int, case: Case, quick: bool) -> list[Strategy]:
    return [strategy for strategy in strategies(world, case) if is_quick(world, case, strategy) == quick]


def at(world: int, case: Case) -> Case:
    """Six samples a rank: they divide into the same micro batches at any number of ranks."""
    return replace(case, global_batch=6 * world)


@cache
def outcomes(world: int, quick: bool) -> dict[tuple[str, str], Outcome]:
    """The quick or the slow cases of every framework at one world size, trained in one set of processes."""
    work = {
        (case.name, strategy.name): (at(world, case), strategy.framework)
        for case in CASES
        for strategy in strategies_of(world, case, quick)
    }
    found = run_ranks(world, train_cases, list(work.values()), timeout_s=800)[0]
    return dict(zip(work, found, strict=True))


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "quick", "case"), TRAININGS)
def test_equals_one_plain_process(world: int, quick: bool, case: Case) -> None:
    found = outcomes(world, quick)
    plain = cache(partial(plain_process, at(world, case)))
    unequal: dict[str, str] = {}
    for strategy in strategies_of(world, case, quick):
        expected = plain(strategy.replicas, strategy.micro_batch, strategy.policy)
        try:
            outcome = found[case.name, strategy.name]
            assert_equal(outcome, expected, TOLERANCES[case.model.name, case.precision])
            written = expected_ledger(at(world, case), expected)
            assert {name: outcome.ledger[name] for name in written} == written
        except AssertionError as error:
            unequal[strategy.name] = str(error)
    assert not unequal, "\n".join(f"{name}: {text}" for name, text in unequal.items())


def plain_process(case: Case, replicas: int, micro_batch: int | None, policy: bool = False) -> Outcome:
    """micro_batch counts where the case gives none."""
    return reference(replace(case, micro_batch=case.micro_batch or micro_batch, policy=policy), replicas)


def expected_ledger(case: Case, expected: Outcome) -> dict[str, Any]:
    """What the record of every framework must say alike; replicas and micro batches are its own."""
    return {
        "samples": case.steps * case.global_batch,
        "updates": case.steps,
        "skipped_updates": 0,
        "dropped_samples_per_epoch": 5,
        "global_batch": case.global_batch,
        "precision": case.precision,
        "reduce_dtype": "fp32",
        "clip_norm": case.clip_norm,
        "weight_decay": 1e-4,
        "label_smoothing": 0.0,
        "seed": case.seed,
        "lr_first": case.lr,
        "lr_last": case.lr,
        "weights_hash_start": weights_hash(expected.start),
    }


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
