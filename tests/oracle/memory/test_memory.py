"""Each memory formula is within its stated error of what a rehearsal of the same job counts.

tests/oracle/memory_grid.py has the grid. Here every framework is compared at 4 ranks with every model, and with one
model in two samples a micro batch, checkpointed and with its own knobs; some also at 2 and 8 ranks.
"""

from __future__ import annotations

from functools import cache
from math import ceil

import pytest

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.oracle.bands import CAST_ERROR, worst_error
from tests.oracle.made import by_roofline
from tests.oracle.memory_grid import OF_SEGMENTS, OF_SOME, Case, grid, predicted, rehearsed, rehearsed_ranks
from tests.support.libraries import why_no_horovod

STATES = 0.05  # of weights and optimizer state: padding, small weights that are kept twice
QUICK = [
    Case("ddp", "gpt2_small", 2, "plain"),
    Case("ddp", "gpt2_small", 2, "apart"),
    Case("tensor", "gpt2_small", 2, "gathered"),
    *(Case(name, "gpt2_small", 2, "accumulated") for name in ("zero_bubble", "1f1b")),  # half as many micro batches
    *(Case("ddp", "gpt2_small", 2, variant) for variant in OF_SEGMENTS),
    Case("1f1b", "gpt2_small", 2, "budget"),
    Case("megatron", "gpt2_small", 2, "plain"),
    *(Case(name, "gpt2_small", 2, "cast") for name in ("zero1", "zero3")),
]
REPLICATED = OF_SOME["replicated"]
TWO = ("1f1b", "gpipe", "pipedream_2bw", "zero1", "zero2", "zero3", "zero_bubble")
EIGHT = ("ddp", "fsdp", "gpipe", "1f1b", "zero_bubble", "interleaved", "hybrid", "tensor", "zero3")


def with_one_model(case: Case) -> bool:
    """ResNet where its BatchNorm or its images decide, else GPT-2."""
    images = case.framework in ("channel", "spatial")
    batch_norm = case.variant == "accumulated" and case.framework != "megatron"
    return case.model == ("resnet50" if images or batch_norm else "gpt2_small")


SLOW = [
    *(case for case in grid(ranks=(4,)) if case.variant == "plain" or with_one_model(case)),
    *(case for case in grid(TWO, (2,)) if case.model == "gpt2_small"),
    *(Case(name, "gpt2_small", 8, "plain") for name in EIGHT),
    *(Case(name, "gpt2_small", 2, "every:2") for name in ("gpipe", "1f1b", "zero2", "tensor")),
    *(Case(name, "resnet50", 2, "selective") for name in ("ddp", "gpipe", "spatial")),
    *(Case(name, "gpt2_small", 2, "selective") for name in ("fsdp", "zero3", "tensor", "pipedream", "1f1b")),
]


@cache
def config_of(case: Case) -> Config:
    return configuration(*case.words)


def compare(case: Case) -> None:
    if case.framework == "horovod" and (why := why_no_horovod()):
        pytest.skip(why)
    config = config_of(case)
    row = predicted(config, case.ranks)
    if row.status == "unsupported":
        pytest.skip(row.reason)
    counted = rehearsed_ranks(config, row)
    assert row.memory is not None
    assert row.memory_bytes is not None
    weights, optimizer = row.memory["weights"], row.memory["optimizer"]
    # Where two ranks need almost the same, the formula may take the other one for the fullest.
    rank = min(counted, key=lambda memory: abs(memory["parameters"] - weights))
    assert weights == pytest.approx(rank["parameters"], rel=STATES)
    # PipeDream's optimizer has the newest version of the weights, the model of an earlier stage an older one.
    expected = (optimizer, optimizer + weights) if case.framework == "pipedream" else (optimizer,)
    assert any(bytes_ == pytest.approx(rank["optimizer"], rel=STATES) for bytes_ in expected), (rank, expected)
    assert row.memory_error == (CAST_ERROR if case.variant == "cast" else worst_error(case.framework))
    assert row.memory_bytes == pytest.approx(counted[0]["peak"], rel=row.memory_error)


def name(case: Case) -> str:
    return f"{case.framework}-{case.model}-{case.ranks}-{case.variant}"


@pytest.mark.parametrize("case", QUICK, ids=name)
def test_predicted_bytes_are_within_the_stated_error(case: Case) -> None:
    compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=name)
def test_predicted_bytes_of_the_grid(case: Case) -> None:
    compare(case)


def test_zero_2_adds_up_beside_complete_gradients_of_the_tensors_of_which_a_rank_has_a_part() -> None:
    """Most weights are in one layer, as in VGG-16."""
    words = Case("zero2", "vgg16", 4, "plain").words
    require_stated_error(configuration(*words, "model.hidden=2048", "train.micro_batch=1"))


def test_zero_3_reduces_a_large_gradient_alone_and_after_its_block() -> None:
    """Tensors, bucket and prefetch as with a width of 2,048, 64 times as small."""
    buckets = ("framework.reduce_bucket_mb=0.4", "framework.gather_bucket_mb=3")
    sizes = ("n_layer=4", "n_embd=256", "n_head=4", "vocab_size=6000", "seq_len=32")
    keys = ("+framework=zero3", "+model=gpt2_small", *(f"model.{size}" for size in sizes), "train.batch_per_gpu=1")
    require_stated_error(configuration(*keys, *buckets))


@pytest.mark.parametrize("framework", ["single", "fsdp"])
def test_the_gradients_of_a_tied_parameter_and_their_sum_are_there_at_once(framework: str) -> None:
    """Short sequences and a large vocabulary: no activations hide it."""
    sizes = ("n_layer=2", "n_embd=128", "n_head=2", "vocab_size=8000", "seq_len=16")
    keys = (f"+framework={framework}", "+model=gpt2_small", *(f"model.{size}" for size in sizes))
    require_stated_error(configuration(*keys, "train.batch_per_gpu=1"), 1 if framework == "single" else 4)


@pytest.mark.parametrize("key", ["train.reduce_dtype=fp16", "recipe=lars"])
def test_a_bucket_in_16_bits_and_the_temporary_tensors_of_an_optimizer(key: str) -> None:
    sizes = ("channels=[8,8,8,8,8]", "hidden=1024", "image_size=32")
    keys = ("+framework=ddp", "+model=vgg16", *(f"model.{size}" for size in sizes), "train.batch_per_gpu=1")
    require_stated_error(configuration(*keys, key), 4)


def require_stated_error(config: Config, ranks: int = 4) -> None:
    row = predicted(config, ranks)
    assert row.memory_bytes == pytest.approx(rehearsed_ranks(config, row)[0]["peak"], rel=row.memory_error)


@pytest.mark.parametrize(("framework", "more", "shards"), [("ddp", (), 1), ("fsdp", (), 4), ("fsdp", REPLICATED, 2)])
def test_states_in_8_bits(framework: str, more: tuple[str, ...], shards: int) -> None:
    """A rehearsal counts codes, scales and, for each parameter, 4 bytes of its number of updates: the oracle leaves
    these out."""
    words = Case(framework, "gpt2_small", 4, "plain").words
    config = configuration(*words, "model.n_embd=256", "recipe=adamw8bit", *more)
    weights = [(weight.shape[0], weight[:1].numel()) for weight in config.model.build().parameters()]
    sizes = [ceil(rows / shards) * row for rows, row in weights]
    states = sum(2 * (size + 4 * ceil(size / 256)) if size >= 4096 else 8 * size for size in sizes)
    assert rehearsed(config, 0, 4)["optimizer"] == states + 4 * len(sizes)
    memory = predicted(config, 4).memory
    assert memory is not None
    assert memory["optimizer"] == pytest.approx(states)


def test_selective_needs_more_memory_and_less_time_than_blocks() -> None:
    """By the operators' FLOPs and bytes on an H100: the cheap ones move bytes twice."""
    words = Case("ddp", "gpt2_small", 2, "plain").words
    rows = [
        by_roofline(configuration(*words, f"train.checkpoint_activations={value}"), 2)
        for value in ("none", "selective", "blocks")
    ]
    none, selective, blocks = ((row.memory_bytes or 0, -(row.step_s or 0)) for row in rows)
    assert none > selective > blocks
    assert none[1] > selective[1] > blocks[1]
