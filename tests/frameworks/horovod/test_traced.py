"""The spans of all-reduces whose ends no call reports; those of Horovod itself: tests/run/scenarios/test_window.py."""

from __future__ import annotations

import time
from itertools import count
from types import SimpleNamespace

import torch

from ddlbench.frameworks.horovod.traced import NAME, InFlight, trace_horovod
from ddlbench.measure.devices.usage import thread_seconds
from ddlbench.measure.profiling.profile import Profiler
from tests.support.busy import compute, needs_thread_seconds
from tests.support.libraries import needs_horovod


def library() -> SimpleNamespace:
    """Two functions of horovod.torch.optimizer: a handle is a number, and what is waited for gives twice its number."""
    handles = count(1)
    return SimpleNamespace(allreduce_async_=lambda tensor: next(handles), synchronize=lambda handle: 2 * handle)


def test_a_span_ends_when_its_end_is_noticed() -> None:
    made, ended = library(), set[int]()
    flight = InFlight(made, ended.__contains__)
    with Profiler(torch.device("cpu")) as profiler:
        first, second = made.allreduce_async_("a"), made.allreduce_async_("b")
        ended.add(first)
        third = made.allreduce_async_("c")
        assert list(flight.open) == [second, third]
        assert made.synchronize(second) == 2 * second
        assert list(flight.open) == [third]
        made.synchronize(third)
    spans = sorted((event.begin, event.end) for event in profiler.events() if event.name == NAME)
    (_, first_end), (second_begin, second_end), (third_begin, third_end) = spans
    assert second_begin < first_end <= third_begin < second_end <= third_end


def test_without_a_profiler_nothing_is_kept() -> None:
    made = library()
    flight = InFlight(made, lambda handle: False)
    assert made.synchronize(made.allreduce_async_("a")) == 2
    assert flight.open == {}


@needs_thread_seconds
def test_a_wait_without_sleep_is_not_the_time_of_the_rank() -> None:
    """The library's wait keeps the thread busy, as Horovod's does."""
    made, waited = library(), list[float]()

    def busy(handle: int) -> None:
        began = time.perf_counter()
        compute(0.5)
        waited.append(time.perf_counter() - began)

    made.synchronize = busy
    InFlight(made, lambda handle: False)
    before, began = thread_seconds(), time.perf_counter()
    made.synchronize(made.allreduce_async_("a"))
    compute(0.05)
    used, passed = thread_seconds() - before, time.perf_counter() - began
    assert 0.04 <= used <= passed - sum(waited) + 0.01


@needs_horovod
def test_horovods_functions_are_replaced_once() -> None:
    trace_horovod()
    import horovod.torch.optimizer as optimizer  # pyright: ignore[reportMissingImports]

    before = optimizer.allreduce_async_, optimizer.synchronize
    trace_horovod()
    assert (optimizer.allreduce_async_, optimizer.synchronize) == before
