"""Work over several processes gives the results of one, in order."""

from __future__ import annotations

import os
import time

import pytest

from ddlbench.results.reading.cores import MOST, Workers, cores


def with_process(numbers):
    return [(number, os.getpid()) for number in numbers]


def test_few_items_are_one_part_of_this_process():
    assert Workers(2).map(with_process, range(3), few=3) == [[(number, os.getpid()) for number in range(3)]]
    assert Workers(2).map(with_process, [], few=0) == [[]]
    assert len(Workers(1).map(with_process, range(40), few=3)) == 1


def slow_at_first(numbers):
    time.sleep(0.2 if 0 in numbers else 0)
    return with_process(numbers)


def inverses(numbers):
    return [1 / number for number in numbers]


def test_many_items_are_done_elsewhere_in_their_order():
    """Although the first part is done last; an error of one item is raised; later work is done there too."""
    with Workers(2) as workers:
        parts = workers.map(slow_at_first, range(40), few=10)
        found = [pair for part in parts for pair in part]
        assert [number for number, _ in found] == list(range(40))
        assert len(parts) > 2
        processes = {process for _, process in found}
        assert os.getpid() not in processes
        with pytest.raises(ZeroDivisionError):
            workers.map(inverses, [1, 0, 3], few=1)
        started = [workers.start(with_process, [number]) for number in range(5)]
        done = [each.result(60)[0] for each in started]
        assert [number for number, _ in done] == list(range(5))
        assert {process for _, process in done} <= processes


def test_work_is_done_here_where_no_process_has_started():
    with Workers(2) as workers:
        assert workers.start(with_process, [1]).result(0) == [(1, os.getpid())]
        with pytest.raises(ZeroDivisionError):
            workers.start(inverses, [0])


def test_cores_are_bounded():
    assert 1 <= cores() <= MOST
