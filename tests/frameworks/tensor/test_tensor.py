"""Tensor parallelism's knobs, random numbers, states and refusals; that it trains what one process trains is
tests/equality/test_equal_training.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from ddlbench.recipe.recipe import CrossEntropy
from tests.equality.distances import TOLERANCES, distance
from tests.support.broken import OwnTokens
from tests.support.changed_job import ChangedJob
from tests.support.equal import assert_reloaded, facts_of, make_job, overflow, ready, reload, train_cases
from tests.support.jobs import ranks, refused, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case, Outcome, reference

TEXT = GPT2("gpt2", n_layer=1, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
IMAGES = VGG("vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7, dropout=0.0)
CASE = Case("gpt2", TEXT, micro_batch=2, lr=0.02, global_batch=6, steps=3)
CLIPPED = replace(CASE, clip_norm=0.05)


@dataclass
class ChangedTensor(ChangedJob, TensorParallel): ...


@dataclass
class ChangedDDP(ChangedJob, DDP): ...


EXACT = TOLERANCES["gpt2", "fp32"].weights
KNOBS = {
    "clipped": (CLIPPED, TensorParallel()),
    "tokens, clipped": (CLIPPED, TensorParallel(sequence_parallel=True)),
    "tokens, checkpointed": (replace(CASE, checkpoint_activations=True), TensorParallel(sequence_parallel=True)),
    "gathered logits": (CASE, TensorParallel(parallel_loss=False)),
    "untied": (replace(CASE, model=replace(TEXT, tie_weights=False)), TensorParallel()),
    "replicas only": (replace(CASE, micro_batch=3), TensorParallel(dp=2)),
    "channels last": (Case("vgg", IMAGES, global_batch=6, steps=3), ChangedTensor(changes={"channels_last": True})),
}
BY_CHANNELS = TensorParallel("channel", convolutions="channels")
KNOBS |= {
    "channels": (Case("vgg", IMAGES, global_batch=6, steps=3), BY_CHANNELS),
    "channels, clipped, checkpointed": (
        Case("vgg", IMAGES, global_batch=6, steps=3, clip_norm=0.05, checkpoint_activations=True, micro_batch=2),
        BY_CHANNELS,
    ),
}
FAULTS = {"own tokens": (CASE, OwnTokens(sequence_parallel=True))}

SMOOTHED = {
    "loss": CrossEntropy(0.1),
    "optimizer": partial(
        make_optimizer, OptimizerConfig("adamw", lr=0.02, weight_decay=0.1, decay_norm_and_bias=False)
    ),
}


def train_knobs() -> list[Outcome]:
    return train_cases([(case, framework) for case, framework in (KNOBS | FAULTS).values()])


def train_smoothed() -> list[Outcome]:
    """AdamW and label smoothing: two ranks of one replica, and two replicas."""
    case = replace(CASE, micro_batch=3)
    return train_cases([(case, ChangedTensor(changes=SMOOTHED)), (case, ChangedDDP(changes=SMOOTHED))])


def dropped() -> dict[str, dict[str, Tensor]]:
    """Parameters after two updates with dropout, of this rank and whole, while one rank draws numbers in between."""
    result: dict[str, dict[str, Tensor]] = {}
    for name, tokens, checkpoint in (("", False, False), ("again", False, True), ("tokens", True, False)):
        case = replace(CASE, model=replace(TEXT, dropout=0.5), checkpoint_activations=checkpoint)
        with ready(TensorParallel(sequence_parallel=tokens), make_job(case)) as (trainer, batch):
            for _ in range(2):
                torch.rand(dist.get_rank() + 1)  # as a loader would on the rank that reads
                trainer.step(batch)
            named = trainer.model.named_parameters()
            result[name] = {key: each.detach().clone() for key, each in named if key not in trainer.splits}
    return result


def zeros_of_dropout() -> dict[str, Tensor]:
    """Which units VGG's two dropouts dropped on this rank."""
    job, outcomes = make_job(Case("vgg", replace(IMAGES, dropout=0.5), global_batch=6)), dict[str, Tensor]()

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, __, output: outcomes.update({name: output.detach() == 0})

    with ready(TensorParallel(), job) as (trainer, batch):
        for name in ("fc6", "fc7"):  # dropout over inputs that no ReLU has set to zero
            dropout = trainer.model.get_submodule(f"{name}.dropout")
            dropout.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
            dropout.register_forward_hook(note(name))
        trainer.step(batch)
    return outcomes


def sent() -> dict[str, int]:
    """Collectives of one update of one micro batch."""
    job = make_job(replace(CASE, micro_batch=None))
    with ready(TensorParallel(), job) as (trainer, batch), CommDebugMode() as watched:
        trainer.step(batch)
    return {str(name): n for name, n in watched.get_comm_counts().items()}


def overflowing() -> tuple[int, bool, int, bool]:
    return overflow(TensorParallel(), make_job(replace(CASE, precision="fp16")), only="h0.mlp.c_fc.weight")


WORK: dict[str, Callable[[], Any]] = {
    "trained": train_knobs, "smoothed": train_smoothed, "dropped": dropped, "zeros_of_dropout": zeros_of_dropout,
    "sent": sent, "overflowing": overflowing, "reloaded": partial(reload, CASE, TensorParallel()),
    "facts": partial(facts_of, CASE, TensorParallel(sequence_parallel=True)),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(2, results, WORK)


def test_knobs_train_the_same(outcomes: list[dict[str, Any]]) -> None:
    trainings = zip((KNOBS | FAULTS).items(), outcomes[0]["trained"], strict=True)
    off = {
        name: distance(outcome.weights, reference(case, framework.layout(2).dp))
        for (name, (case, framework)), outcome in trainings
    }
    assert all(off[name] <= EXACT for name in KNOBS), off
    assert all(off[fault] > 100 * EXACT for fault in FAULTS), off  # the central test would notice


def test_label_smoothing_and_adamw_are_those_of_ddp(outcomes: list[dict[str, Any]]) -> None:
    ours, theirs = outcomes[0]["smoothed"]
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    assert distance(ours.weights, replace(theirs, start=reference(CASE, 1).start)) <= 1e-3


def test_whole_activations_lose_the_same_units_on_every_rank(outcomes: list[dict[str, Any]]) -> None:
    for name in ("", "again", "tokens"):
        first, second = (each["dropped"][name] for each in outcomes)
        assert all(torch.equal(first[key], second[key]) for key in first), name
    # A checkpointed block drops the same units when it runs again.
    plain, again = outcomes[0]["dropped"][""], outcomes[0]["dropped"]["again"]
    assert all(torch.equal(plain[key], again[key]) for key in plain)
    assert "h0.ln_1.weight" in plain


def test_own_units_are_dropped_by_each_rank_for_itself(outcomes: list[dict[str, Any]]) -> None:
    first, second = (each["zeros_of_dropout"] for each in outcomes)
    assert first["fc6"].shape == (6, 16)  # half of 32 units
    assert not torch.equal(first["fc6"], second["fc6"])
    assert torch.equal(first["fc7"], second["fc7"])
    assert 0 < first["fc7"].sum() < first["fc7"].numel()


def test_what_an_update_sends(outcomes: list[dict[str, Any]]) -> None:
    # Forward the embedding's and the block's two sums, backward the block's two and the head's, the loss two. Rank 0
    # sends its samples as two tensors.
    assert outcomes[0]["sent"] == {"c10d.broadcast_": 2, "c10d.allreduce_": 8}


def test_all_ranks_skip_an_update_that_overflows_on_one(outcomes: list[dict[str, Any]]) -> None:
    assert [each["overflowing"] for each in outcomes] == [(1, False, 2, True)] * 2


def test_a_loaded_state_is_what_it_computes_with_and_gives_back(outcomes: list[dict[str, Any]]) -> None:
    assert_reloaded((rank["reloaded"] for rank in outcomes), TEXT)


def test_facts_count_this_ranks_parameters(outcomes: list[dict[str, Any]]) -> None:
    vocabulary, positions, norms = 31 * 32, 16 * 32, 3 * 2 * 32
    attention = (32 * 48 + 48) + (16 * 32 + 32)  # qkv of two heads, projection
    mlp = (32 * 64 + 64) + (64 * 32 + 32)
    assert outcomes[0]["facts"] == {
        "staleness": 0, "dp": 1, "tp": 2, "sequence_parallel": True, "convolutions": "filters", "parallel_loss": True,
        "parameters_per_rank": vocabulary + positions + norms + attention + mlp, "reduce_dtype": "fp32",
    }  # fmt: skip
    assert outcomes[1]["facts"]["parameters_per_rank"] == outcomes[0]["facts"]["parameters_per_rank"] - 32


def test_degrees_that_do_not_divide_are_refused_with_both_numbers() -> None:
    refused(TensorParallel(), ranks(8), r"8 ranks cannot share the 4 heads of h0\.attn: .*tp=4 framework\.dp=2")
    resnet = ResNet("resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=64, num_classes=7)
    with pytest.raises(Unsupported, match=r"16 ranks cannot share the 8 filters of layer1_0\.conv1: .*tp=8 .*dp=2"):
        TensorParallel().check(ranks(16, resnet))
    refused(TensorParallel(), ranks(6, IMAGES), r"6 ranks cannot share the 8 filters of conv1_1\.conv: .*tp=2 .*dp=3")
    refused(TensorParallel(), ranks(8, replace(IMAGES)), "8 ranks cannot share the 7 classes")
    TensorParallel(dp=2, tp=4).check(ranks(8))
    # The three channels of the images are not shared.
    with pytest.raises(Unsupported, match=r"16 ranks cannot share the 8 channels of conv1_2\.conv: .*tp=8 .*dp=2"):
        BY_CHANNELS.check(ranks(16, replace(IMAGES, hidden=64, num_classes=64)))
    refused(BY_CHANNELS, ranks(2), "channel: gpt2 has no convolutions to split: choose framework=tensor")
    wrong_knob(TensorParallel, r"framework\.convolutions=rows must be", convolutions="rows")


def test_a_mesh_that_does_not_fill_the_ranks_is_refused() -> None:
    with pytest.raises(UserError, match=r"dp=2 x framework\.tp=3 does not fill 4 .*: choose .*dp=2 framework\.tp=2$"):
        TensorParallel(dp=2, tp=3).check(ranks(4))
    wrong_knob(TensorParallel, r"framework\.dp=0 must be 1 or more", dp=0)


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    lamb = partial(make_optimizer, OptimizerConfig("lamb", lr=0.02))
    refused(TensorParallel(), ranks(2, optimizer=lamb), "Lamb needs the norm of each full layer")
    TensorParallel(dp=2).check(ranks(2, optimizer=lamb))
    refused(TensorParallel(sequence_parallel=True), ranks(2, IMAGES), "vgg has no sequence")
    with pytest.raises(Unsupported, match=r"2 ranks cannot share the 15 tokens .*seq_len=14"):
        TensorParallel(sequence_parallel=True).check(ranks(2, replace(TEXT, seq_len=15)))
    refused(TensorParallel(), ranks(2, compile=True), r"train\.compile=false")
    refused(TensorParallel(), ranks(2, reduce_dtype="bf16"), "bf16 need NCCL")
