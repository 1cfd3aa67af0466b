"""What follows from values of which some are not known."""

from __future__ import annotations

from ddlbench.measure.devices.unknown import difference, largest, least, or_none, total


def test_a_part_of_a_sum_is_no_sum() -> None:
    assert total([10, 40, 20]) == 70
    assert total([10, None, 20]) is None
    assert total([]) is None


def test_extremes_are_those_of_the_known_values() -> None:
    assert (least([None, 3, 2]), largest([None, 3, 2])) == (2, 3)
    assert (least([None]), largest([])) == (None, None)


def test_a_counter_has_grown_only_between_two_readings() -> None:
    assert difference(2, 5) == 3
    assert difference(None, 5) is difference(2, None) is None


def test_what_cannot_be_read_is_none() -> None:
    assert or_none(lambda: 1 // 0) is None
    assert or_none(lambda: 7) == 7
