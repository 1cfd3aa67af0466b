"""The measured bubble; steps of invented lengths."""

from __future__ import annotations

from itertools import chain
from typing import cast

import pytest
import torch
import torch.distributed as dist

from ddlbench.frameworks.pipeline.clock import RECENT_STEPS, BusyClock
from tests.support.ranks import run_ranks


def clock_of(*steps: tuple[float, list[tuple[float, float]]]) -> BusyClock:
    clock = BusyClock(torch.device("cpu"))
    clock.steps.extend(((0.0, end), list(spans)) for end, spans in steps)
    return clock


def test_what_is_not_computing_is_bubble() -> None:
    assert BusyClock(torch.device("cpu")).bubble() is None
    assert clock_of((10.0, [(0.0, 2.0), (5.0, 7.5)])).bubble() == pytest.approx(0.55)


def test_one_slow_step_does_not_count() -> None:
    usual = (10.0, [(0.0, 8.0)])
    assert clock_of((100.0, [(0.0, 1.0)]), usual, usual).bubble() == pytest.approx(0.2)


def two_ranks() -> float | None:
    return clock_of((10.0, [(0.0, 9.0 if dist.get_rank() else 6.0)])).bubble()


@pytest.mark.slow
def test_it_is_the_share_of_all_ranks_time() -> None:
    assert run_ranks(2, two_ranks) == [pytest.approx(0.25)] * 2


def test_only_what_runs_within_a_schedule_is_marked() -> None:
    clock = BusyClock(torch.device("cpu"))
    double = clock.computing(lambda number: 2 * number)
    assert double(2) == 4  # as in validation
    for _ in range(RECENT_STEPS + 1):
        with clock.schedule():
            double(double(1))
        double(1)
    assert [len(spans) for _, spans in clock.steps] == [2] * RECENT_STEPS
    for (begin, end), spans in clock.steps:
        marks = cast(list[float], [begin, *chain(*spans), end])
        assert marks == sorted(marks)
