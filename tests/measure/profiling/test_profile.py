"""Shares of a window, computed by hand from planted events: 100 ns are 100 units."""

from __future__ import annotations

import platform
from dataclasses import asdict, replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddlbench.job import Place
from ddlbench.measure.profiling.profile import MOST_PASSES, Event, RankWindow, Seconds, covered, divide, passes_of
from ddlbench.measure.profiling.spans import BACKWARD, COMMUNICATE, DATA, FORWARD, UPDATE, WAIT, WINDOW
from tests.support.jobs import job

NS = 1e-9


def units(seconds: Seconds) -> dict[str, int]:
    return {name.removesuffix("_s"): round(value / NS) for name, value in asdict(seconds).items()}


# 0   10       40        70      85   90   100
# data forward   backward  (wait)  upd  idle
HOST = [
    Event(WINDOW, 0, 100),
    Event(DATA, 0, 10),
    Event("aten::div", 2, 9),  # the batch is normalized: data, not computation
    Event(FORWARD, 10, 40),
    Event("aten::mm", 10, 30),
    Event("aten::addmm", 12, 28),  # within the other
    Event(BACKWARD, 40, 85),
    Event("autograd::engine::evaluate_function: MmBackward0", 40, 85),  # hooks in it may wait
    Event("aten::mm", 40, 70),
    Event("gloo:all_reduce", 50, 65),  # overlapped
    Event("gloo:all_reduce", 60, 85),  # two at a time; exposed from 70 on
    Event("c10d::allreduce_", 60, 84),
    Event(UPDATE, 85, 90),
    Event("aten::add_", 86, 90),
    Event("aten::zero_", 95, 96),  # in no span
    Event("aten::mm", -50, -10),  # before the window
    Event("gloo:all_reduce", -20, -5),  # the barrier there
    Event("gloo:all_reduce", 98, 140),  # ends after it
]


def test_the_parts_of_a_step_on_the_host() -> None:
    result = divide(HOST, on_device=False)
    assert units(result) == {
        "window": 100, "forward": 20, "backward": 30, "update": 4, "other": 1, "data": 10,
        "communication": 37,  # 50 to 85, 98 to 100
        "exposed": 17,  # 70 to 85, 98 to 100
        "idle": 18,  # 30 to 40, 85 to 86, 90 to 95, 96 to 98
    }  # fmt: skip
    shares = result.shares()
    assert shares["comm_exposed_share"] == pytest.approx(0.17)
    assert shares["comm_share"] == pytest.approx(0.37)
    own = [shares[name] for name in ("compute_share", "comm_exposed_share", "data_share", "idle_share")]
    assert sum(own) == pytest.approx(1, abs=1e-12)
    parts = [shares[f"{name}_share"] for name in ("forward", "backward", "update", "other_compute")]
    assert sum(parts) == pytest.approx(shares["compute_share"], abs=1e-12)


def test_a_send_counts_while_its_sender_waits_for_it() -> None:
    """gloo's event of a send ends when a rank waits for it."""
    events = [
        Event(WINDOW, 0, 100), Event("gloo:send", 0, 90), Event("aten::mm", 0, 40), Event(WAIT, 80, 90),
        Event("gloo:recv", 50, 60),
    ]  # fmt: skip
    result = units(divide(events, on_device=False))
    assert (result["communication"], result["exposed"], result["idle"]) == (20, 20, 40)
    assert RankWindow.of(job(), Place(0, 1), 1, events).collectives == 2


def test_a_call_that_starts_a_message_is_communication_on_the_host_alone() -> None:
    """gloo's threads hold the connection while they copy: the host that asks for the next message waits for them."""
    events = [
        Event(WINDOW, 0, 100), Event("aten::mm", 0, 40), Event("c10d::send", 40, 60), Event("c10d::recv_", 55, 70),
        Event("gloo:recv", 70, 90),
    ]  # fmt: skip
    result = units(divide(events, on_device=False))
    assert (result["communication"], result["exposed"], result["idle"]) == (50, 50, 10)
    assert RankWindow.of(job(), Place(0, 1), 1, events).collectives == 1  # not the call besides
    kernel = Event("ncclDevKernel_SendRecv", 70, 90, device=True, launched=40)
    assert units(divide([*events, kernel], on_device=True))["exposed"] == 20


def test_waiting_for_data_while_a_collective_runs_is_communication() -> None:
    events = [Event(WINDOW, 0, 100), Event(DATA, 20, 60), Event("horovod:all_reduce", 0, 50)]
    result = units(divide(events, on_device=False))
    assert (result["exposed"], result["data"], result["idle"]) == (50, 10, 40)


def test_time_that_several_events_cover_counts_once() -> None:
    """As with sets of single moments. Some events lie within others, some side by side, and some have no length."""
    draw, edges = Random(0), np.arange(51)
    for count in (0, *[6] * 300):
        times = [(begin, begin + draw.randrange(7)) for begin in draw.sample(range(40), count)]
        expected = {moment for begin, end in times for moment in range(begin, end)}
        assert np.flatnonzero(covered(edges, times)).tolist() == sorted(expected)


NAMES = ("aten::mm", "gloo:all_reduce", "gloo:send", "c10d::recv_", WAIT, FORWARD, UPDATE, DATA)


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-20, 120), st.integers(0, 60)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_every_moment_counts_once_whatever_the_order_of_events_and_the_unit_of_time(
    planted: list[tuple[str, int, int]], random: Random
) -> None:
    events = [Event(WINDOW, 0, 100), *(Event(name, begin, begin + length) for name, begin, length in planted)]
    result = units(divide(events, on_device=False))
    assert sum(value for name, value in result.items() if name not in ("window", "communication")) == 100
    assert min(result.values()) >= 0
    mixed = [replace(each, begin=3 * each.begin, end=3 * each.end) for each in random.sample(events, len(events))]
    assert units(divide(mixed, on_device=False)) == {name: 3 * value for name, value in result.items()}


# The host launches and runs ahead; the device computes later, on two streams and one of NCCL.
DEVICE = [
    Event(WINDOW, 0, 100),
    Event(DATA, 0, 5),
    Event(FORWARD, 5, 10),
    Event("aten::mm", 5, 9),  # the host's: no computation of the device
    Event(BACKWARD, 10, 20),
    Event(COMMUNICATE, 20, 22),
    Event(UPDATE, 22, 25),
    Event("cudaDeviceSynchronize", 25, 100),
    Event("Memcpy HtoD (Pinned -> Device)", 0, 8, device=True, launched=1),
    Event("normalize", 8, 10, device=True, launched=3),  # in the span of the data
    Event("sm90_gemm", 10, 40, device=True, launched=6),
    Event("sm90_gemm", 40, 70, device=True, launched=12),
    Event("sm90_reduce", 60, 75, device=True, launched=13),  # another stream
    Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 90, device=True, launched=14),
    Event("scale", 90, 91, device=True, launched=21),  # in the span of communication
    Event("multi_tensor_apply_kernel", 91, 94, device=True, launched=23),
    Event("Memcpy HtoD (Pinned -> Device)", 94, 96, device=True, launched=24),  # of an optimizer on the host
    Event("Memset", 96, 97, device=True, launched=None),
    Event("gloo:all_reduce", 0, 100),  # the harness's: on the host
]


def test_the_parts_of_a_step_on_a_device() -> None:
    assert units(divide(DEVICE, on_device=True)) == {
        "window": 100, "forward": 30, "backward": 35, "update": 3, "communication": 40, "data": 10, "idle": 3,
        "other": 4,  # with the copy to the host's optimizer
        "exposed": 15,  # 75 to 90
    }  # fmt: skip


def test_decoding_on_the_device_hides_neither_communication_nor_idle_time() -> None:
    """DALI's threads launch the kernels of the next batch, outside of any span."""
    events = [
        Event(WINDOW, 0, 100),
        Event(FORWARD, 0, 20),
        Event("sgemm", 0, 40, device=True, launched=1),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 80, device=True, launched=15),
        Event("void dali::kernels::resize<1>()", 30, 90, device=True, launched=None),
    ]
    counted = units(divide(events, on_device=True))
    assert [counted[part] for part in ("forward", "exposed", "data", "idle")] == [40, 40, 10, 10]


def test_copies_of_offloaded_activations_count_where_no_kernel_runs() -> None:
    """The forward pass ends before the copy to the host, and the backward pass waits for the copy back."""
    events = [
        Event(WINDOW, 0, 100),
        Event(FORWARD, 0, 5),
        Event("sm90_gemm", 0, 20, device=True, launched=1),
        Event("Memcpy DtoH (Device -> Pinned)", 10, 50, device=True, launched=2),
        Event(BACKWARD, 5, 9),
        Event("Memcpy HtoD (Pinned -> Device)", 50, 80, device=True, launched=6),
        Event("Memcpy DtoD (Device -> Device)", 80, 82, device=True, launched=7),
        Event("sm90_gemm", 75, 100, device=True, launched=8),
    ]
    counted = units(divide(events, on_device=True))
    assert [counted[part] for part in ("forward", "backward", "other")] == [20, 25, 55]


def test_collectives_and_parts_of_a_window_are_counted() -> None:
    last = Place(0, 1, coordinates={"dp": 0, "pp": 1})
    host = RankWindow.of(replace(job(), rank=1), last, 4, HOST)
    device = RankWindow.of(replace(job(), device=torch.device("cuda")), Place(0, 1), 4, DEVICE)
    assert (host.collectives, device.collectives) == (3, 1)
    assert host.parts == (FORWARD, BACKWARD, UPDATE, DATA)
    assert device.parts == (FORWARD, BACKWARD, UPDATE, COMMUNICATE, DATA)
    assert host.line() == {
        "rank": 1,
        "host": platform.node(),
        "stage": 1,
        "collectives": 3,
        **asdict(host.seconds),
        "compute_s": pytest.approx(55 * NS),
        "own_s": pytest.approx(73 * NS),  # 100 - 10 of data - 17 of exposed communication
        "own_step_s": pytest.approx(73 / 4 * NS),
        "passes": (("forward", 10e-9, 40e-9), ("backward", 40e-9, 85e-9), ("update", 85e-9, 90e-9)),
    }
    assert "passes" not in device.line()  # no stage of a pipeline


def test_what_begins_after_the_window_is_not_in_it() -> None:
    """The end of an epoch follows, under the same profiler."""
    late = [Event(COMMUNICATE, 100, 150), Event("gloo:all_reduce", 100, 150), Event(BACKWARD, 120, 140)]
    stage = Place(0, 1, coordinates={"dp": 0, "pp": 1})
    assert RankWindow.of(job(), stage, 4, [*HOST, *late]) == RankWindow.of(job(), stage, 4, HOST)


def test_shares_over_ranks_are_of_summed_seconds() -> None:
    """A rank of 100 with 17 exposed, one of 300 with 3: 20 / 400, not the mean of 17 % and 1 %."""
    short = divide(HOST, on_device=False)
    long = divide([Event(WINDOW, 0, 300), Event("aten::mm", 0, 200), Event("gloo:all_reduce", 190, 203)], False)
    total = Seconds.total([short, long])
    assert total.window_s == pytest.approx(400 * NS)
    assert total.shares()["comm_exposed_share"] == pytest.approx(20 / 400)
    assert total.shares()["compute_share"] == pytest.approx(255 / 400)


def test_passes_are_spans_of_the_host_after_the_begin_of_the_window() -> None:
    events = [
        Event(FORWARD, 50, 90), Event(FORWARD, 100, 140), Event(BACKWARD, 200, 260), Event(UPDATE, 300, 310),
        Event(DATA, 320, 330), Event("aten::mm", 100, 130),
    ]  # fmt: skip
    assert passes_of(events, 100, on_device=False) == (
        ("forward", 0.0, 40e-9), ("backward", 100e-9, 160e-9), ("update", 200e-9, 210e-9),
    )  # fmt: skip


def test_passes_on_the_device_last_from_their_first_kernel_to_their_last() -> None:
    """The host launches a pass long before the device runs it."""
    events = [
        Event(FORWARD, 100, 110), Event(BACKWARD, 110, 120), Event(UPDATE, 120, 130),
        Event("kernel", 500, 540, device=True, launched=101), Event("kernel", 550, 590, device=True, launched=109),
        Event("kernel", 600, 700, device=True, launched=110), Event("kernel", 10, 20, device=True, launched=99),
    ]  # fmt: skip
    assert passes_of(events, 100, on_device=True) == (("forward", 400e-9, 490e-9), ("backward", 500e-9, 600e-9))


def test_a_record_holds_the_first_passes_of_a_long_window() -> None:
    events = [Event(FORWARD, n, n + 1) for n in range(2 * MOST_PASSES)]
    assert len(passes_of(events, 0, on_device=False)) == MOST_PASSES
