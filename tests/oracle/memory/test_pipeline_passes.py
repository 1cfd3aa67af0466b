"""The bytes of a pipeline's rank, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddlbench.oracle.memory.memory import Sizes
from ddlbench.oracle.memory.peak import Moment
from ddlbench.oracle.memory.pipeline_passes import Halves, StageBytes, replay, stage_bytes
from ddlbench.oracle.timing.schedule import whole_order

# A micro batch keeps 10, lives on 12 forward and 15 backward; the stage has gradients of 7, of which 3 are there at the
# fullest moment of the first backward pass.
STAGE = StageBytes(kept=10, ahead=12, first=Moment(3, 11), back=15, gradients=7)


def test_gpipe_keeps_all_micro_batches() -> None:
    """Of four: the last forward pass 3 x 10 + 12, the first backward pass 3 x 10 + 3 + 11, the second, with all
    gradients, 2 x 10 + 7 + 15."""
    assert replay(whole_order("gpipe", 0, 2, 2, 4), {0: STAGE}) == Moment(3, 41)


def test_1f1b_keeps_as_many_as_there_are_stages_after_it() -> None:
    """Stage 0 of 2: a forward pass beside one micro batch 10 + 7 + 12, a backward pass 10 + 7 + 15."""
    assert replay(whole_order("1f1b", 0, 2, 2, 4), {0: STAGE}) == Moment(7, 25)
    assert replay(whole_order("1f1b", 1, 2, 2, 4), {1: STAGE}) == Moment(7, 15)


def test_the_gradient_of_an_input_waits_for_the_next_exchange() -> None:
    assert replay(whole_order("1f1b", 1, 2, 2, 4), {1: replace(STAGE, returned=2)}) == Moment(7, 17)


def test_zero_bubble_keeps_a_micro_batch_until_the_gradients_of_its_weights() -> None:
    """Rank 1 of 2, three micro batches: F0 I0 F1 I1 W0 F2 I2 W1 W2. I2: W1 is not done (14), of I0, I1 and W0 inputs'
    gradients are left (1 each), and its own 16: 14 + 2 x 1 + 7 + 16; W1: 14 of I2 + 3 + 7 + 18."""
    halves = StageBytes(10, 12, Moment(3, 11), 15, 7, halves=Halves(inputs=16, between=14, weights=18, after=1))
    ops = whole_order("zero_bubble", 1, 2, 2, 3)
    assert "".join(f"{kind}{micro}" for kind, _, micro in ops) == "F0I0F1I1W0F2I2W1W2"
    assert replay(ops, {1: halves}) == Moment(7, 14 + 3 + 18)


def test_the_first_stage_does_both_halves_at_once() -> None:
    """Rank 0 of 2, three micro batches: F0 F1 I0 W0 F2 I1 W1 I2 W2."""
    ops = whole_order("zero_bubble", 0, 2, 2, 3)
    assert "".join(f"{kind}{micro}" for kind, _, micro in ops) == "F0F1I0W0F2I1W1I2W2"
    assert replay(ops, {0: STAGE}) == Moment(7, 25)


# The example of docs/oracle.md: A keeps 10 and B 20, and B's output, of 1, nobody keeps.
A = Sizes(entering=4, leaving=3, kept=10, ahead=11, back=12, added=4, again=11)
B = Sizes(entering=0, leaving=1, kept=20, ahead=22, back=30, added=26, lingering=1, loss=2)


def test_a_stage_holds_its_output_and_not_its_input() -> None:
    """The input of 4, which A keeps, has memory of its own: 6 + 20 + 1; backward of B 6 + 26 + 1, the first time 6 + 30
    + 1."""
    found = stage_bytes([A, B], False, [8, 4], ends=False)
    assert (found.kept, found.ahead, found.back, found.first, found.gradients) == (27, 28, 33, Moment(0, 37), 12)


@pytest.mark.parametrize(("ends", "kept"), [(False, 3 + 1), (True, 3 + 1 + 2)])
def test_a_checkpointed_stage_keeps_inputs_of_blocks_its_output_and_the_loss(ends: bool, kept: float) -> None:
    assert stage_bytes([A, B], True, [8, 4], ends).kept == kept
