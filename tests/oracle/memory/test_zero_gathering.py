"""The weights that DeepSpeed's stage 3 has gathered, by hand."""

from __future__ import annotations

from ddlbench.oracle.memory.zero_gathering import Weight, gathered

# Two blocks of two parameters, each in a module of its own within its block's: root 0, block 1, 2, 3, block 4, 5, 6.
WEIGHTS = [Weight(0, 2, 10), Weight(0, 3, 20), Weight(1, 5, 30), Weight(1, 6, 40)]


def test_one_message_is_there_twice_until_its_last_weight_is_used() -> None:
    assert gathered(WEIGHTS, [False, False], 1e9).ahead == [200, 200]
    assert gathered(WEIGHTS, [False, False], 1e9).back == [30, 100]


def test_messages_are_asked_for_at_every_module() -> None:
    """Two messages, of 10 + 20 + 30 and of 40 by itself, which is not copied: both are there before the first weight is
    used."""
    assert gathered(WEIGHTS, [False, False], 35).ahead == [60 + 60 + 40, 60 + 60 + 40]


def test_each_weight_by_itself_is_there_once() -> None:
    """Two modules ask before the first weight is used, three before the second, all before the third."""
    assert gathered(WEIGHTS, [False, False], 1).ahead == [60, 100]


def test_what_is_needed_late_is_gathered_again() -> None:
    """Of the second block 70; while the second runs backward, the first is gathered already."""
    assert gathered(WEIGHTS, [True, True], 1e9).back == [30, 100]
