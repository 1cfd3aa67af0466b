"""Sets of time, by hand."""

from __future__ import annotations

import random

import pytest

from ddlbench.measure.profiling.intervals import Intervals, difference, intersection, length, union


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([(5, 9), (0, 2)], [(0, 2), (5, 9)]),
        ([(0, 4), (2, 6)], [(0, 6)]),
        ([(0, 10), (2, 3), (4, 5)], [(0, 10)]),  # one within another
        ([(0, 2), (2, 4)], [(0, 4)]),  # side by side
        ([(3, 3), (5, 4)], []),  # without a length
    ],
)
def test_union(given: Intervals, expected: Intervals) -> None:
    assert union(given) == expected


def test_intersection_and_difference() -> None:
    first, second = [(0, 10), (20, 30)], [(5, 22), (25, 26), (29, 40)]
    assert intersection(first, second) == [(5, 10), (20, 22), (25, 26), (29, 30)]
    assert difference(first, second) == [(0, 5), (22, 25), (26, 29)]
    assert difference(second, first) == [(10, 20), (30, 40)]
    assert length(difference(first, second)) == 11
    assert (intersection(first, []), difference(first, []), difference([], first)) == ([], first, [])


def test_they_agree_with_sets_of_single_moments() -> None:
    draw = random.Random(0)
    for _ in range(300):
        first, second = (union((b, b + draw.randrange(6)) for b in draw.sample(range(40), 5)) for _ in range(2))
        a, b = ({moment for begin, end in found for moment in range(begin, end)} for found in (first, second))
        assert length(intersection(first, second)) == len(a & b)
        assert length(difference(first, second)) == len(a - b)
        assert length(union([*first, *second])) == len(a | b)
