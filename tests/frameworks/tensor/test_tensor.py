"""Tensor parallelism's random numbers, messages and refusals; that it trains what one process trains is tested in
tests/equality/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.vgg import VGG
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.equality.cases import MODELS
from tests.support.equal import facts_of, make_job, ready
from tests.support.jobs import ranks, refused, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case

TEXT = GPT2("gpt2", n_layer=1, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)
RESNET, IMAGES = MODELS["resnet"], cast(VGG, MODELS["vgg"])
CASE = Case("gpt2", TEXT, micro_batch=2, global_batch=6, steps=3)


BY_CHANNELS = TensorParallel("channel", convolutions="channels")


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


def copies() -> list[bool]:
    """Whether what every rank has is equal on both, in bits, after each of some steps. The first convolution of rank 1
    adds in another order, as an algorithm of cuDNN may."""
    job, equal = make_job(Case("resnet", RESNET, global_batch=8)), list[bool]()
    with ready(BY_CHANNELS, job) as (trainer, batch):
        conv: Any = trainer.model.get_submodule("stem.conv1")
        if dist.get_rank() == 1:
            conv._conv_forward = lambda x, weight, bias: F.conv2d(
                x.flip(1), weight.flip(1), bias, conv.stride, conv.padding
            )
        for _ in range(3):
            trainer.step(batch)
            unsplit = torch.cat([parameter.detach().flatten() for parameter in trainer.unsplit])
            both = [torch.empty_like(unsplit) for _ in range(2)]
            dist.all_gather(both, unsplit)
            equal.append(torch.equal(*both))
    return equal


def scored() -> list[tuple[int, ...]]:
    """Shapes of what an evaluation scores."""
    shapes = list[tuple[int, ...]]()
    for framework, job in ((TensorParallel(), make_job(CASE)), (Pipeline(), make_job(CASE))):
        with ready(framework, job) as (trainer, batch):
            trainer.evaluate(batch, lambda output, samples: shapes.append((*output.shape, len(samples.valid))))
    return shapes


WORK: dict[str, Callable[[], Any]] = {
    "zeros_of_dropout": zeros_of_dropout, "sent": sent, "copies": copies, "scored": scored,
    "facts": partial(facts_of, CASE, TensorParallel(sequence_parallel=True)),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(2, results, WORK)


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


def test_copies_of_unsplit_parameters_stay_equal_if_kernels_round_differently(
    outcomes: list[dict[str, Any]],
) -> None:
    assert outcomes[0]["copies"] == [True] * 3


def test_an_evaluation_has_all_classes_of_few_samples_at_a_time(outcomes: list[dict[str, Any]]) -> None:
    """Rank 0 scores sample by sample where ranks share classes, the last stage of a pipeline a micro batch of two."""
    assert [each["scored"] for each in outcomes] == [[(1, 16, 61, 1)] * 6, [(2, 16, 61, 2)] * 3]


def test_facts_count_this_ranks_parameters(outcomes: list[dict[str, Any]]) -> None:
    vocabulary, positions, norms = 31 * 32, 16 * 32, 3 * 2 * 32
    attention = (32 * 48 + 48) + (16 * 32 + 32)  # qkv of two heads, projection
    mlp = (32 * 64 + 64) + (64 * 32 + 32)
    assert outcomes[0]["facts"] == {
        "staleness": 0, "dp": 1, "tp": 2, "sequence_parallel": True, "convolutions": "filters", "parallel_loss": True,
        "parameters_per_rank": vocabulary + positions + norms + attention + mlp, "reduce_dtype": "fp32",
    }  # fmt: skip
    assert outcomes[1]["facts"]["parameters_per_rank"] == outcomes[0]["facts"]["parameters_per_rank"] - 32


class Plain(VGG):
    """A model of which no layer can be shared."""

    def tensor_plan(self) -> dict[str, str]:
        return {}


def test_degrees_that_do_not_divide_are_refused_with_both_numbers() -> None:
    refused(TensorParallel(), ranks(8), r"8 ranks cannot share the 4 heads of h0\.attn: .*tp=4 framework\.dp=2")
    refused(
        TensorParallel(), ranks(16, RESNET), r"16 ranks cannot share the 8 filters of layer1_0\.conv1: .*tp=8 .*dp=2"
    )
    refused(TensorParallel(), ranks(6, IMAGES), r"6 ranks cannot share the 8 filters of conv1_1\.conv: .*tp=2 .*dp=3")
    refused(TensorParallel(), ranks(8, IMAGES), "8 ranks cannot share the 7 classes")
    TensorParallel(dp=2, tp=4).check(ranks(8))
    # The three channels of the images are not shared.
    wide = replace(IMAGES, hidden=64, num_classes=64)
    refused(BY_CHANNELS, ranks(16, wide), r"16 ranks cannot share the 8 channels of conv1_2\.conv: .*tp=8 .*dp=2")
    odd = replace(TEXT, seq_len=15)
    refused(TensorParallel(sequence_parallel=True), ranks(2, odd), r"2 ranks cannot share the 15 tokens .*seq_len=14")


@pytest.mark.parametrize(
    "framework", [TensorParallel(), BY_CHANNELS, Pipeline("hybrid", tp=2)], ids=["filters", "channels", "hybrid"]
)
def test_a_model_without_shared_classes_is_refused(framework: Any) -> None:
    """Each rank would count complete logits as its part of them."""
    refused(framework, ranks(2, Plain(**vars(IMAGES))), r"vgg names no layer .* framework\.tp=1 framework\.dp=2")


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    wrong_knob(TensorParallel, r"framework\.convolutions=rows must be", convolutions="rows")
    refused(BY_CHANNELS, ranks(2), "channel: gpt2 has no convolutions to split: choose framework=tensor")
    refused(TensorParallel(sequence_parallel=True), ranks(2, IMAGES), "vgg has no sequence")
    lamb = partial(make_optimizer, OptimizerConfig("lamb", lr=0.02))
    TensorParallel(dp=2).check(ranks(2, optimizer=lamb))  # no layer is shared
