"""Cutting a model into stages: balance, boundaries, names."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch

from ddlbench.frameworks.pipeline import stages as module
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.stages import Plan, Stage, balanced, boundary_tensors, cut, tied_names
from ddlbench.models.gpt2 import GPT2
from tests.support.jobs import job

TINY = GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0)


@pytest.mark.parametrize(
    ("costs", "stages", "sizes"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([5, 1, 1, 1], 2, [1, 3]),
        ([1, 2, 3, 4, 5], 3, [3, 1, 1]),  # 6, 4, 5
        ([0, 4, 4, 4, 0, 6], 2, [3, 3]),  # 8, 10
        ([7], 1, [1]),
        ([0, 0, 0], 3, [1, 1, 1]),
    ],
)
def test_the_largest_stage_is_as_small_as_can_be(costs: list[float], stages: int, sizes: list[int]) -> None:
    assert balanced(tuple(costs), stages) == tuple(sizes)


@pytest.mark.parametrize(
    ("sending", "sizes"),
    [
        ([0, 9, 0, 0], [1, 3]),  # in the middle 9, to its left and right 3: the fewest blocks first
        ([9, 9, 1, 0], [3, 1]),
        ([2, 2, 2, 9], [2, 2]),  # as fast as computing; what the last block gives is not sent
        ([9, 3, 9, 0], [2, 2]),  # expensive, but the other cuts cost more
    ],
)
def test_a_stage_is_as_slow_as_what_it_sends(sending: list[float], sizes: list[int]) -> None:
    assert balanced((1, 1, 1, 1), 2, tuple(sending)) == tuple(sizes)


def test_no_other_cuts_are_better() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs: list[float] = torch.randint(100, (9,), generator=generator).tolist()
        chosen = tuple(accumulate(balanced(tuple(costs), 4)[:-1]))
        assert largest(costs, chosen) == min(largest(costs, cuts) for cuts in combinations(range(1, 9), 3))


def largest(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)]))


def test_the_balance_of_a_deep_model_is_found_at_once() -> None:
    assert max(balanced((1.0,) * 52, 16)) == 4


def test_measured_seconds_give_another_cut_than_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """embed, h0, h1, ln_f, head: an embedding has no FLOPs, and takes as long here as all others together."""
    given = replace(job(), model=TINY)
    seconds = [8.0, 2.0, 2.0, 1.0, 3.0]
    monkeypatch.setattr(module, "seconds_of_blocks", lambda *_: seconds)
    knobs: list[dict[str, Any]] = [{}, {"balance_by": "seconds"}, {"balance_by": "seconds", "balance": [3, 2]}]
    plans = [Plan(given, [2, 2], 2, Pipeline(flops_per_byte=0, **keys)) for keys in knobs]
    assert [plan.sizes for plan in plans] == [[2, 3], [1, 4], [3, 2]]
    assert [plan.facts()["balanced_by"] for plan in plans] == ["flops", "seconds", "balance"]
    assert [plan.facts()["block_seconds"] for plan in plans] == [None, seconds, None]


def test_what_is_sent_counts_beside_seconds_too() -> None:
    """40 FLOPs of the model in 4 s: a block of 1 s costs as much as 10 bytes with 1 FLOP a byte."""
    pipeline, sent = Pipeline(balance_by="seconds", flops_per_byte=1), [9.0, 31.0, 9.0, 0.0]
    assert pipeline.sizes(2, [40, 0, 0, 0], sent, [1, 1, 1, 1]) == [1, 3]
    assert pipeline.sizes(2, [40, 0, 0, 0], [0.0] * 4, [1, 1, 1, 1]) == [2, 2]


def test_stages_have_the_whole_models_names_and_weights() -> None:
    whole = TINY.build()
    parts = cut(whole, [2, 2, 1])
    states = [part.state_dict() for part in parts]
    assert [name for state in states for name in state] == list(whole.state_dict())
    tokens = torch.arange(32).view(2, 16)
    value = tokens
    for part in parts:
        value = Stage(part, job())(value)
    assert torch.equal(value, whole(tokens))


def test_boundary_tensors_are_what_really_passes() -> None:
    here = replace(job("bf16"), model=TINY)
    result = boundary_tensors(here, samples=3)
    value = torch.zeros(3, 16, dtype=torch.int64)
    for part, before, after in zip(cut(TINY.build(), [1] * 5), result, result[1:], strict=False):
        assert (value.shape, value.dtype) == (before.shape, before.dtype)
        value = Stage(part, here)(value)
        assert (value.shape, value.dtype) == (after.shape, after.dtype)
        assert after.requires_grad
    assert len(result) == 6
    assert not result[0].requires_grad
    assert result[1].dtype == torch.float32  # embeddings are not cast
    assert result[-1].dtype == torch.bfloat16
    assert result[1].nbytes == 3 * 16 * 32 * 4


def test_what_passes_can_be_sent() -> None:
    images = replace(job(), channels_last=True)
    blocks = images.build()
    passed = Stage(cut(blocks, [2, 4])[0], images)(torch.randn(2, 3, 32, 32))
    assert passed.is_contiguous()


def test_tied_parameters_are_found() -> None:
    assert tied_names(TINY.build()) == [["embed.wte.weight", "head.weight"]]
    assert tied_names(replace(TINY, tie_weights=False).build()) == []
