"""Work over several processes gives the results of one, in order."""

from __future__ import annotations

import os
import time

import pytest

from ddlbench.report.cores import MOST, cores, over_cores


def with_process(numbers):
    return [(number, os.getpid()) for number in numbers]


def test_few_items_are_one_part_of_this_process():
    assert over_cores(with_process, range(3), 2, few=3) == [[(number, os.getpid()) for number in range(3)]]
    assert over_cores(with_process, [], 2, few=0) == [[]]
    assert len(over_cores(with_process, range(40), 1, few=3)) == 1


def slow_at_first(numbers):
    time.sleep(0.2 if 0 in numbers else 0)
    return with_process(numbers)


def test_many_items_are_done_elsewhere_in_their_order():
    """Although the first part is done last."""
    parts = over_cores(slow_at_first, range(40), 2, few=10)
    found = [pair for part in parts for pair in part]
    assert [number for number, _ in found] == list(range(40))
    assert len(parts) > 2
    assert os.getpid() not in {process for _, process in found}


def inverses(numbers):
    return [1 / number for number in numbers]


def test_an_error_of_one_item_is_raised():
    with pytest.raises(ZeroDivisionError):
        over_cores(inverses, [1, 0, 3], 2, few=1)


def test_cores_are_bounded():
    assert 1 <= cores() <= MOST
