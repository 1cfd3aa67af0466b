"""The rank, local rank and addresses of Horovod's processes, without horovodrun; the spans of all-reduces whose ends no
call reports. Those of Horovod itself: tests/run/scenarios/test_window.py."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from itertools import count
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from ddlbench.frameworks.horovod.adapter import Horovod, horovod_torch
from ddlbench.frameworks.horovod.core import (
    NAME,
    InFlight,
    delayed_abort,
    meeting,
    places,
    started_by_mpi,
    trace_horovod,
)
from ddlbench.frameworks.shared.environment import environment
from ddlbench.measure.devices.usage import thread_seconds
from ddlbench.measure.profiling.profile import Profiler
from tests.support.busy import compute, needs_thread_seconds
from tests.support.equal import make_job, ready
from tests.support.faults import end
from tests.support.jobs import CASE
from tests.support.libraries import needs_horovod, why_no_horovod
from tests.support.ranks import Forked, run_ranks


def test_places_of_five_ranks_on_three_hosts() -> None:
    hosts = ["a", "b", "a", "c", "b"]
    result = [places(hosts, rank) for rank in range(5)]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    assert [tuple(place[f"HOROVOD_{name}"] for name in names) for place in result] == [
        ("0", "5", "0", "2", "0", "3", "a"),
        ("1", "5", "0", "2", "1", "3", "b"),
        ("2", "5", "1", "2", "0", "2", "a"),
        ("3", "5", "0", "1", "2", "3", "c"),
        ("4", "5", "1", "2", "1", "2", "b"),
    ]


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    with environment({"HOROVOD_CYCLE_TIME": "1", "HOROVOD_RANK": "0"}):
        assert (os.environ["HOROVOD_CYCLE_TIME"], os.environ["HOROVOD_RANK"]) == ("1", "0")
    assert os.environ["HOROVOD_CYCLE_TIME"] == "2"
    assert "HOROVOD_RANK" not in os.environ


def test_torchruns_ranks_are_not_mpis(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not started_by_mpi()
    monkeypatch.setenv("PMIX_RANK", "0")
    assert started_by_mpi()
    monkeypatch.setenv("RANK", "0")
    assert not started_by_mpi()


def start_twice() -> tuple[list[tuple[int, int, int]], str | None, dict[str, str]]:
    """Size, rank and local rank of Horovod started twice in the same process, what it leaves in the environment, and
    the addresses at which its ranks connect."""
    places = [] if why_no_horovod() else [started(), started()]
    left = os.environ.get("HOROVOD_RANK")
    os.environ["GLOO_SOCKET_IFNAME"] = "ib0,eth0"
    return places, left, meeting(1234)


def started() -> tuple[int, int, int]:
    with ready(Horovod(), make_job(CASE)):
        hvd = horovod_torch()
        return hvd.size(), hvd.rank(), hvd.local_rank()


@pytest.mark.slow
def test_ranks_connect_again_at_the_same_addresses() -> None:
    ranks = run_ranks(2, start_twice)
    for _, _, met in ranks:
        assert met == {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "ib0",
        }  # fmt: skip
    if why_no_horovod() is None:  # each start finds the ranks of the launch
        assert [places for places, _, _ in ranks] == [[(2, 0, 0)] * 2, [(2, 1, 1)] * 2]
        assert {left for _, left, _ in ranks} == {None}


def aborted() -> NoReturn:
    with delayed_abort():
        threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
        time.sleep(0.5)
        os._exit(3)


def test_an_abort_while_horovod_starts_leaves_time_to_record_the_end() -> None:
    assert end([Forked(aborted)])[0] == [3]


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
