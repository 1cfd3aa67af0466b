"""The peak of the passes and of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.counts.counts import Counts, Line, most
from ddlbench.oracle.memory.passes import Moment, arriving, at_peak, passes, update_copies
from tests.oracle.made import AGAIN, KEPT, A, B, block, setting, sized


def test_gradients_arrive_while_activations_are_freed() -> None:
    """Backward pass of B: 10 + 30, without gradients of A; of A: 12, and the 4 of B."""
    assert passes([A, B], 1, KEPT, [8, 4], accumulating=False) == Moment(0, 40)
    assert passes([A, sized(20, 0, 1, 26)], 1, KEPT, [8, 4], accumulating=False) == Moment(4, 12)


def test_a_long_forward_pass_is_the_peak() -> None:
    assert passes([A, sized(20, 35, 30, 26)], 1, KEPT, [8, 4], accumulating=False) == Moment(0, 45)


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


def test_a_checkpointed_block_runs_again_beside_its_output_s_gradient() -> None:
    """B: its input of 3, and 30, or 22 + 1 when it runs again; A: 11 + 3 when it runs again, and the 4 of B."""
    assert passes([A, B], 1, AGAIN, [8, 4], accumulating=False) == Moment(0, 33)
    assert passes([A, sized(20, 2, 1, 1)], 1, AGAIN, [8, 4], accumulating=False) == Moment(4, 14)


def test_a_checkpointed_block_counts_its_unsaved_input_and_output_once() -> None:
    """B: its input of 3 is among its 30; A runs again without making its output of 3."""
    first = replace(A, unsaved_output=3)
    assert passes([first, B], 1, AGAIN, [8, 4], accumulating=False) == Moment(0, 30)
    assert passes([first, sized(20, 2, 1, 1)], 1, AGAIN, [8, 4], accumulating=False) == Moment(4, 12)


def test_what_a_library_gathers_for_a_block_is_there_while_it_runs() -> None:
    assert passes([A, B], 1, KEPT, [8, 4], False, gathered=[(0, 0), (7, 100)]) == Moment(0, 140)
    assert passes([A, B], 1, KEPT, [8, 4], False, gathered=[(100, 0), (0, 0)]) == Moment(0, 111)


@pytest.mark.parametrize(("accumulating", "expected"), [(False, [80, 200, 320]), (True, [0, 0, 320])])
def test_a_tied_gradient_is_there_from_the_last_block_on(accumulating: bool, expected: list[float]) -> None:
    blocks = block("embed", 1, 2, numbers=100), block("middle", 1, 2, numbers=50), block("head", 1, 2)
    assert arriving(Counts("made", blocks, 80), accumulating) == expected


def test_copies_of_the_update_are_of_the_largest_tensor() -> None:
    """SGD with weight decay makes one copy, Adam two."""
    blocks = [replace(block("a", 1, 2), tensor_sizes=(3, 7)), block("b", 1, 2, numbers=5)]
    assert [update_copies(name, blocks) for name in ("sgd", "adam")] == [28, 56]
    assert update_copies("sgd", blocks, part=0.5) == 14


def test_weights_gathered_in_16_bits_are_not_copied_again() -> None:
    less = replace(A, tensor_sizes=(2,)).with_16_bit_weights()
    assert (less.saved.at(1), most(less.live_forward, 1), most(less.live_backward, 1)) == (6, 7, 8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_has_at_least_what_it_saves(precision: str) -> None:
    """With 3 samples, which were not counted."""
    for item in setting(1, precision=precision).counts.blocks:
        assert most(item.live_forward, 3) >= item.saved.at(3)
        assert most(item.live_backward, 3) >= most(item.live_accumulating, 3) > 0
