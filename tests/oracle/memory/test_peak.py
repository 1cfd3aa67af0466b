"""The fullest moment of a step, by hand."""

from __future__ import annotations

import pytest

from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.memory.memory import Sizes
from ddlbench.oracle.memory.peak import Beside, Moment, arriving, fullest, passing
from tests.oracle.made import block, setting

# In MB: the example of docs/oracle.md. 10 and 20 are kept, 8 and 4 of gradients arrive.
A = Sizes(entering=0, leaving=3, kept=10, ahead=11, back=12, added=4, again=11, turning=3)
B = Sizes(
    entering=0, leaving=1, kept=20, ahead=22, back=30, added=26, again=22, turning=1, freeing=30, freeing_added=26
)


def test_gradients_arrive_while_activations_go() -> None:
    """Backward of B: 10 + 30, with nothing of A's gradients; of A: 12, and the 4 of B."""
    assert passing([A, B], False, [8, 4]) == Moment(0, 40)
    assert passing([A, B._replace(back=1, ahead=0)], False, [8, 4]) == Moment(4, 12)


def test_gradients_with_memory_of_their_own_are_there_all_the_time() -> None:
    """All 12 + 10 + 26."""
    during = passing([A, B], False, None)
    assert during == Moment(0, 36)
    assert fullest(Bytes(12, 12, 24), during, room=2, update=8, in_place=True).total == 12 + 24 + 2 + 48


def test_the_update_can_be_the_fullest_moment() -> None:
    """Copies of the largest tensor beside all gradients: 12 + 50 are more than 40."""
    memory = fullest(Bytes(12, 12, 24), Moment(0, 40), room=2, update=50, in_place=False)
    assert (memory.gradients, memory.activations) == (12, 50)
    assert memory.total == 12 + 24 + 2 + 62


def test_an_input_that_no_block_before_keeps_is_there_too() -> None:
    assert passing([A._replace(entering=5), B], False, [8, 4]) == Moment(0, 40), "A keeps it, among its 10"
    assert passing([A, B._replace(entering=5)], False, [8, 4]) == Moment(0, 45)


def test_a_checkpointed_block_runs_again_beside_its_output_s_gradient() -> None:
    """Of A its input of 5 is there, of B its input of 3, which is A's output: 5 + 3 + 30, or for A 5 + (11 + 3) + 4."""
    assert passing([A._replace(entering=5), B], True, [8, 4]) == Moment(0, 38)
    assert passing([A._replace(entering=5), B._replace(ahead=0, again=0, freeing=1)], True, [8, 4]) == Moment(4, 19)


def test_an_input_ends_with_its_last_use_where_nothing_else_refers_to_it() -> None:
    """Of B the 3 of its input are free at the fullest moment, so 30 - 3; where A keeps it, they stay. A batch stays."""
    ends = B._replace(freeing=27, freeing_added=23)
    assert passing([A, ends], False, [8, 4]) == Moment(0, 40)
    assert passing([A, ends._replace(entering=3)], False, [8, 4]) == Moment(0, 10 + 3 + 27)
    assert passing([A, ends._replace(entering=3)], False, None) == Moment(0, 10 + 3 + 23)
    assert passing([A._replace(entering=5), ends], True, [8, 4]) == Moment(0, 5 + 3 + 27)
    assert passing([ends._replace(entering=3)], True, [4]) == Moment(0, 3 + 30)


def test_what_a_library_gathers_for_a_block_is_there_while_it_runs() -> None:
    assert passing([A, B], False, [8, 4], Beside([0, 100], [0, 7])) == Moment(0, 132)
    assert passing([A, B], False, [8, 4], Beside([0, 0], [0, 7])) == Moment(0, 47)


def test_a_tied_gradient_is_there_from_the_last_block_on() -> None:
    blocks = [block("embed", 1, 2, numbers=100), block("middle", 1, 2, numbers=50), block("head", 1, 2)]
    assert arriving(blocks, 0) == [400, 200, 0]
    assert arriving(blocks, 80) == [80, 200, 320]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_lives_in_a_block_is_at_least_what_it_keeps(precision: str) -> None:
    """At 3 samples, which were not counted."""
    for each in setting(1, precision=precision).counts.blocks:
        assert each.ahead.most(3) + 3 * each.entering >= each.kept.at(3)
        assert each.back.most(3) >= each.added.most(3) > 0
