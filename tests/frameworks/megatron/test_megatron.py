"""megatron-core's layers, and what they cannot do; that they train what one process trains is tested in
tests/equality/."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ddlbench.config.compose import refusal
from ddlbench.errors import Unavailable
from ddlbench.frameworks.megatron.adapter import Megatron, import_megatron
from ddlbench.frameworks.megatron.layers import Attention, from_original, to_original, transformer_config
from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.job import Job
from ddlbench.models.gpt2 import GPT2
from ddlbench.oracle.machine.machine import load
from ddlbench.oracle.measured.inputs import from_roofline
from ddlbench.oracle.predictor import Inputs, predict
from ddlbench.recipe.recipe import CrossEntropy
from tests.equality.cases import MODELS
from tests.support.equal import facts_of
from tests.support.jobs import ranks, refused, wrong_knob
from tests.support.ranks import run_ranks
from tests.support.reference import Case
from tests.support.rehearsals import WORLD, config, rehearsed

TEXT = cast(GPT2, MODELS["gpt2"])


CASE = Case("gpt2", TEXT, global_batch=8)


def test_each_rank_drops_attention_of_its_own_heads() -> None:
    value = torch.rand(16, 2, 2, 8)  # [T, B, heads, size]

    def mixed(rank: int, training: bool = True) -> Tensor:
        torch.manual_seed(1)
        return Attention(Part(None, rank, 2), 0.5).train(training)(value, value, value, None)

    assert torch.equal(mixed(0), mixed(0))
    assert not torch.equal(mixed(0), mixed(1))
    assert torch.equal(mixed(0, training=False), mixed(1, training=False))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_equations_send_what_it_sends_on_cuda(precision: str) -> None:
    """Forward the embedding's sum and two of each of three blocks, backward as many with the head's, the loss three."""
    made, machine = config("megatron", "gpt2_small", f"train.precision={precision}"), load("h100")
    row = predict(made, WORLD, Inputs(machine, lambda given: from_roofline(given, machine)))
    traced = rehearsed("megatron", "gpt2_small", f"train.precision={precision}", device="cuda")
    layers = next(one for one in row.messages if one["what"] == "collectives of layers")
    sums = [one for one in traced.collectives or () if (one.kind, one.ranks) == ("all_reduce", 4)]
    assert [(one.count, one.bytes_) for one in sums] == [(layers["count"], layers["bytes_"])]
    assert layers["count"] == 7 + 7 + 3
    assert not traced.host_waits


@pytest.mark.parametrize(
    "name", ["h0.attn.c_attn.weight", "h0.attn.c_attn.bias", "h1.mlp.c_proj.weight", "embed.wpe.weight"]
)
def test_a_layout_has_an_inverse(name: str) -> None:
    weight = TEXT.build().state_dict()[name]
    full = torch.arange(weight.numel()).view_as(weight)
    assert torch.equal(to_original(name, from_original(name, full, TEXT), TEXT), full)


def test_queries_keys_and_values_are_side_by_side_for_each_head() -> None:
    """Rows of the library's matrix: 8 queries of head 0, its 8 keys, its 8 values, then head 1."""
    rows = from_original("h0.attn.c_attn.bias", torch.arange(96), TEXT)
    assert rows[:32].tolist() == [*range(8), *range(32, 40), *range(64, 72), *range(8, 16)]


@pytest.mark.parametrize("fused", [False, True])
def test_the_activation_is_that_of_gpt2(fused: bool) -> None:
    """The exact GELU is so close to its approximation that small models train the same with both."""
    import_megatron(torch.device("cpu"))
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    x, bias = torch.linspace(-4, 4, 101), torch.ones(())
    plain: Any = TEXT.build().get_submodule("h0.mlp.act")
    with torch.compiler.set_stance("force_eager"):
        result = bias_gelu_impl(x, bias) if fused else transformer_config(TEXT, 1, fused).activation_func(x + bias)
    assert (result - plain(x + bias)).abs().max() < 1e-6
    assert (result - torch.nn.functional.gelu(x + bias)).abs().max() > 1e-4


def test_facts_say_which_layers_they_are() -> None:
    vocabulary, positions, norms = 31 * 32, 16 * 32, 5 * 2 * 32
    attention = (32 * 48 + 48) + (16 * 32 + 32)  # qkv of two heads, projection
    mlp = (32 * 64 + 64) + (64 * 32 + 32)
    assert run_ranks(2, facts_of, CASE, Megatron())[0] == {
        "staleness": 0, "dp": 1, "tp": 2, "layers": "local", "fused_kernels": False,
        "parameters_per_rank": vocabulary + positions + norms + 2 * (attention + mlp), "reduce_dtype": "fp32",
    }  # fmt: skip


CUDA = torch.device("cuda")
REFUSED: list[tuple[Job, Megatron, str]] = [
    (ranks(2, MODELS["resnet"]), Megatron(), "megatron: its layers are those of transformers, not of resnet"),
    (ranks(8), Megatron(), r"8 ranks cannot share the 4 heads of h0\.attn: .*tp=4 framework\.dp=2"),
    (ranks(2, precision="bf16"), Megatron(), r"train\.precision=bf16 on the CPU: .*use train\.precision=fp32"),
    (ranks(2), Megatron(layers="transformer_engine"), "needs CUDA: use framework.layers=local"),
    (replace(ranks(2), loss=CrossEntropy(0.1)), Megatron(), r"recipe\.label_smoothing=0\.1: "),
    (ranks(1, checkpoint_activations="budget:1"), Megatron(), "a budget counts the blocks of transformers' GPT-2"),
    (ranks(1, checkpoint_activations="selective"), Megatron(), "adds up the outputs of its matrix products in place"),
]


@pytest.mark.parametrize(("asked", "framework", "reason"), REFUSED, ids=[reason[:40] for _, _, reason in REFUSED])
def test_what_it_cannot_do_is_refused_before_anything_starts(asked: Job, framework: Megatron, reason: str) -> None:
    refused(framework, asked, reason)


def test_on_gpus_it_takes_mixed_precision() -> None:
    asked = ranks(2, device=CUDA, precision="bf16")
    assert refusal(partial(Megatron().supports, asked)) is None


def test_a_missing_transformer_engine_is_said_with_the_remedy() -> None:
    with pytest.raises(Unavailable, match=r"transformer_engine cannot be imported .*framework\.layers=local"):
        Megatron(layers="transformer_engine").check(ranks(2, device=CUDA))


def test_an_unknown_kind_of_layers_is_refused() -> None:
    wrong_knob(Megatron, r"framework\.layers=apex must be one of local, transformer_engine", layers="apex")
