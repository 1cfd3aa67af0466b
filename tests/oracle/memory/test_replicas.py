"""Peak memory of a rank by hand: the peak of its passes and of a step, with the blocks of docs/oracle.md; in the second
half these have 8 and 4 bytes of weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ddlbench.counts.counts import Block, Counts, Line
from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.memory.replicas import (
    Moment,
    Scheme,
    arriving,
    at_peak,
    batch_bytes,
    fsdp,
    passes,
    replica,
    update_copies,
    zero,
    zero3,
)
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.recipe.optimizers import optimizers
from ddlbench.recomputation import Plan
from tests.oracle.made import AGAIN, KEPT, A, B, block, made, setting, sized

SETTING = made(4, [replace(A, tensor_sizes=(2,)), replace(B, tensor_sizes=(1,))], batch=4)
TWO = made(4, [replace(A, tensor_sizes=(2,)), replace(B, tensor_sizes=(1,))], batch=8, micro_batch=1)
LARGE = made(4, [replace(A, tensor_sizes=(1000,)), replace(B, tensor_sizes=())], batch=4)
UNSAVED = replace(A, unsaved_output=3)
BATCH = batch_bytes(SETTING.job, 1)


@pytest.mark.parametrize(
    ("blocks", "plan", "gathered", "expected"),
    [
        # Backward pass of B: 10 + 30, without gradients of A; of A: 12, and the 4 of B.
        ([A, B], KEPT, (), Moment(0, 40)),
        ([A, sized(20, 0, 1, 26)], KEPT, (), Moment(4, 12)),
        ([A, sized(20, 35, 30, 26)], KEPT, (), Moment(0, 45)),  # a long forward pass is the peak
        # Checkpointed B: its input of 3, and 30, or 22 + 1 when it runs again; A: 11 + 3 when it runs again, and the 4
        # of B. So they run again beside the gradients of their outputs.
        ([A, B], AGAIN, (), Moment(0, 33)),
        ([A, sized(20, 2, 1, 1)], AGAIN, (), Moment(4, 14)),
        # An unsaved input and output count once. B: its input of 3 is among its 30; A runs again without making its
        # output of 3.
        ([UNSAVED, B], AGAIN, (), Moment(0, 30)),
        ([UNSAVED, sized(20, 2, 1, 1)], AGAIN, (), Moment(4, 12)),
        # A library has the bytes that it gathers for a block while the block runs.
        ([A, B], KEPT, [(0, 0), (7, 100)], Moment(0, 140)),
        ([A, B], KEPT, [(100, 0), (0, 0)], Moment(0, 111)),
    ],
)
def test_gradients_arrive_while_activations_are_freed(
    blocks: list[Block], plan: Plan, gathered: list[tuple[float, float]], expected: Moment
) -> None:
    assert passes(blocks, 1, plan, [8, 4], False, gathered) == expected


def test_activations_grow_with_the_batch() -> None:
    growing = replace(A, saved=Line(10, 5), live_backward=Line(np.array([12.0, 1.0]), np.array([1.0, 6.0])))
    assert passes([growing, B], 3, KEPT, [0, 0], accumulating=False) == Moment(0, 10 + 15 + 30)
    assert passes([growing], 1, (0,), [0], accumulating=False) == Moment(0, 13)
    assert passes([growing], 3, (0,), [0], accumulating=False) == Moment(0, 19)


def test_permanent_gradients_are_there_all_the_time() -> None:
    """All 12 + 10 + 26."""
    during = passes([A, B], 1, KEPT, [0, 0], accumulating=True)
    assert during == Moment(0, 36)
    assert at_peak(Bytes(12, 12, 24), [during.plus(12)], permanent=2).total == 12 + 24 + 2 + 48


def test_the_update_can_be_the_peak() -> None:
    memory = at_peak(Bytes(12, 12, 24), [Moment(0, 40), Moment(12, 50)], permanent=2)
    assert (memory.gradients, memory.activations) == (12, 50)
    assert memory.total == 12 + 24 + 2 + 62


@pytest.mark.parametrize(("accumulating", "expected"), [(False, [80, 200, 320]), (True, [0, 0, 320])])
def test_a_tied_gradient_is_there_from_the_last_block_on(accumulating: bool, expected: list[float]) -> None:
    blocks = block("embed", 1, 2, numbers=100), block("middle", 1, 2, numbers=50), block("head", 1, 2)
    assert arriving(Counts(blocks, 80), accumulating) == expected


def test_copies_of_the_update_are_of_the_largest_tensor() -> None:
    """SGD with weight decay makes one copy, Adam two."""
    blocks = [replace(block("a", 1, 2), tensor_sizes=(3, 7)), block("b", 1, 2, numbers=5)]
    assert [update_copies(optimizers[name].costs, blocks) for name in ("sgd", "adam")] == [28, 56]
    assert update_copies(optimizers["sgd"].costs, blocks, part=0.5) == 14


def test_weights_gathered_in_16_bits_are_not_copied_again() -> None:
    less = replace(A, tensor_sizes=(2,)).with_16_bit_weights().link(1, accumulating=False)
    assert (less.saved, less.forward, less.backward) == (6, 7, 8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_has_at_least_what_it_saves(precision: str) -> None:
    """With 3 samples, which were not counted."""
    for item in setting(1, precision=precision).counts.blocks:
        plain, accumulating = (item.link(3, accumulating) for accumulating in (False, True))
        assert plain.forward >= plain.saved
        assert plain.backward >= accumulating.backward > 0


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        (SETTING, {}, Memory(12, 0, 12, 40, BATCH)),  # the backward pass of B
        (TWO, {}, Memory(12, 12, 12, 36, 2 * BATCH)),  # all 12 bytes are there with two micro batches, and two batches
        (SETTING, {"bucketed": True}, Memory(12, 12, 12, 36, BATCH)),  # which have all gradients from step to step
        (SETTING, {"bucketed": True, "views": False}, Memory(12, 0, 12, 40, 12 + BATCH)),  # beside the buckets
        (TWO, {"bucketed": True}, Memory(12, 12, 12, 36, 12 + 2 * BATCH)),  # those of micro batches are beside them
        (SETTING, {"reduced": 50}, Memory(12, 12, 12, 50, BATCH)),  # a copy
        (LARGE, {}, Memory(4000, 4000, 4000, 4000, BATCH)),  # the update copies 1,000 numbers for the weight decay
    ],
)
def test_a_replica_has_all_weights(given: Setting, options: dict[str, Any], expected: Memory) -> None:
    assert replica(given, given.counts, 4, **options) == expected


def test_zero_1_reduces_after_the_backward_pass() -> None:
    """With a bucket of 100 bytes the backward pass of B is the peak. With one of 1 byte and larger tensors, the copy of
    the largest one for its reduction is: 4,000 of gradients beside 1,000 of the rank's share."""
    assert zero(SETTING, 1, 25, overlaps=False, casts=False) == Memory(12, 0, 6, 40, 100 + BATCH)
    assert zero(LARGE, 1, 0.25, overlaps=False, casts=False) == Memory(4000, 4000, 2000, 1000 + 4000, 1 + BATCH)


def test_zero_2_reduces_during_the_backward_pass() -> None:
    """Its share of 3 bytes, and a copy of 8 for the tensor that is larger than the bucket; with two micro batches also
    the complete gradients, 8 + 4 bytes, of the rank whose share is cut from both tensors. A bucket that is never full
    is copied at the end."""
    assert zero(SETTING, 2, 1.5, overlaps=False, casts=False) == Memory(12, 3, 6, 36 + 8, 6 + BATCH)
    assert zero(TWO, 2, 1.5, overlaps=False, casts=False) == Memory(12, 3 + 12, 6, 36 + 8, 6 + 2 * BATCH)
    assert zero(SETTING, 2, 3, overlaps=True, casts=False) == Memory(12, 3, 6, 36, 24 + BATCH)


def test_fsdp_has_the_weights_of_the_block_that_runs() -> None:
    """Backward pass of B: 10 + 30, its 4 bytes of weights, and 8 of the next block, unless that one stays gathered.
    With two micro batches complete gradients are added up."""
    both, one = (Scheme(4, 4, (2, 1), (again, True), always=False) for again in (True, False))
    assert fsdp(SETTING, both) == Memory(3, 0, 3, 40 + 12, BATCH)
    assert fsdp(SETTING, one) == Memory(3, 0, 3, 40 + 4, 8 + BATCH)
    assert fsdp(TWO, both) == Memory(3, 12, 3, 36 + 12, 2 * BATCH)


def test_zero_3_keeps_gathered_weights_and_a_bucket() -> None:
    """12 bytes stay gathered while B runs, and every rank has 4 more of small weights; a full bucket of 6 bytes is
    copied."""
    scheme = Scheme(4, 4, (2, 1), (False, False), always=True)
    small = replace(scheme, persistent=1)
    assert zero3(SETTING, small, bucket=100) == Memory(3 + 4, 3, 6, 36 + 12, 100 + BATCH)
    assert zero3(SETTING, scheme, bucket=6) == Memory(3, 3, 6, 36 + 12 + 6, 6 + BATCH)
