"""What a rank should hold, against the papers' own figures, and against what four ranks do hold."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from benchmarks.held import large_blocks, map_large_blocks, storages, total
from benchmarks.memory import FRAMEWORKS, OPTIMIZERS, Expected, Held, measure_all, stage_counts, tensor_count
from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.frameworks.tensor.layers import split_model
from ddlbench.job import Model
from ddlbench.measure.formulas.memory_formula import SPLIT, Bytes, bytes_of_parameter, data_parallel, touched
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.vgg import VGG
from ddlbench.recipe.optimizers import optimizers
from tests.support.ranks import run_ranks

RANKS = 4
Found = dict[tuple[str, str], tuple[Held, Expected]]


@cache
def results() -> list[Found]:
    """What each rank held and should hold, all frameworks in one set of processes."""
    return run_ranks(RANKS, measure_all, timeout_s=500)


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_four_ranks_hold_the_bytes_of_the_formula_and_malloc_counts_them(kind: str, name: str) -> None:
    for rank in results():
        held, formula = rank[kind, name]
        for what in ("parameters", "gradients", "optimizer"):
            assert getattr(held, what) == pytest.approx(getattr(formula.held, what), rel=0.05), what
        if formula.most is not None:
            assert held.most == pytest.approx(formula.most, rel=0.05)
        tensors = held.parameters + held.gradients + held.optimizer + held.other
        assert held.malloc == pytest.approx(tensors, rel=0.05)


def test_zero_papers_figure_1() -> None:
    """7.5 billion parameters in mixed precision with Adam on 64 devices: 120, 31.4, 16.6 and 1.9 GB."""
    mixed = Bytes(parameters=2, gradients=2, optimizer=12)
    stages = [data_parallel(7_500_000_000, mixed, stage, 64) for stage in range(4)]
    gigabytes = [round(sum(vars(each).values()) / 1e9, 1) for each in stages]
    assert gigabytes == [120.0, 31.4, 16.6, 1.9]


def test_momentum_is_one_number_a_parameter_and_adam_keeps_two() -> None:
    assert bytes_of_parameter(optimizers["sgd"].costs) == Bytes(4, 4, 4)
    assert bytes_of_parameter(optimizers["adamw"].costs) == Bytes(4, 4, 8)
    assert bytes_of_parameter(optimizers["adamw"].costs, own_copy=True) == Bytes(4, 4, 12)


def test_megatron_splits_all_of_gpt2_but_norms_row_biases_and_positions() -> None:
    width, layers, vocab, length, ranks = 768, 12, 50304, 1024, 4
    model = GPT2("gpt2_small", n_layer=layers, n_embd=width, n_head=12, vocab_size=vocab, seq_len=length)
    split = layers * (12 * width**2 + 3 * width + 4 * width) + vocab * width  # matrices, biases of columns, tied head
    whole = layers * (2 * width + 4 * width) + length * width + 2 * width  # biases of rows, two norms; last norm
    count = tensor_count(meta(model), model.tensor_plan(), ranks)
    assert count == split / ranks + whole


def meta(model: Model) -> nn.Sequential:
    with torch.device("meta"):
        return model.build()


def test_the_formula_covers_every_style_of_splitting() -> None:
    """Against what the framework itself cuts, for a model with convolutions too."""
    for model in (
        GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=64, seq_len=16),
        VGG(name="vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=8, dropout=0.0),
    ):
        plan = model.tensor_plan()
        count = tensor_count(model.build(), plan, RANKS)
        cut = model.build()
        split_model(cut, plan, Part(None, 0, RANKS))
        assert count == sum(parameter.numel() for parameter in cut.parameters())
    assert set(SPLIT) == {"column", "qkv", "logits", "vocab", "filter", "channel", "norm", "row"}


def test_a_tied_embedding_counts_at_both_ends_of_a_pipeline() -> None:
    model = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=64, seq_len=16)
    whole = meta(model)
    [one] = stage_counts(whole, [len(whole)])
    assert one == sum(parameter.numel() for parameter in whole.parameters())
    assert sum(stage_counts(whole, [1, 2, 2])) == one + 64 * 32


def test_a_border_between_shards_keeps_a_parameter_whole_on_both_sides() -> None:
    sizes = [6, 4, 2]  # borders at 3, 6, 9
    assert list(touched(sizes, 4)) == [6, 6, 4, 6]


def one_tensor() -> list[int]:
    """Bytes of one tensor of 1 MiB: by its storage, by another's that shares it, by malloc's count; left afterwards."""
    map_large_blocks()
    before = large_blocks()
    whole = torch.zeros(2**18)
    result = [
        total(storages([whole, whole[:5], whole.view(2, -1)])),
        total(storages([whole]), storages([whole[3:]])),
        large_blocks() - before,
    ]
    del whole
    return [*result, large_blocks() - before]


def test_a_storage_counts_once_and_equals_the_count_of_malloc() -> None:
    once, again, allocated, left = run_ranks(1, one_tensor)[0]
    assert (once, again, left) == (2**20, 0, 0)
    assert allocated == pytest.approx(once, rel=0.01)
