from __future__ import annotations

import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddlbench.job import Batch
from ddlbench.measure import clock as clock_module
from ddlbench.measure.clock import EpochClock, EpochTimes
from ddlbench.ranks import control
from tests.support.fake_cuda import DEVICE, FakeCuda
from tests.support.simulated import World

CPU = torch.device("cpu")


def slow(items: int, wait_s: float):
    for item in range(items):
        time.sleep(wait_s)
        yield item


def test_warmup_steps_are_timed_but_not_measured() -> None:
    """With the clock of this machine: steps of 0.05 s, waits of 0.02 s for each batch."""
    clock = EpochClock(CPU, lambda: None, warmup_steps=1)
    for _ in clock.steps(slow(3, 0.02)):
        time.sleep(0.03)
    times = clock.stop()
    assert len(times.step_s) == len(times.wait_s) == 3
    assert all(wait >= 0.02 for wait in times.wait_s)
    assert all(step - wait >= 0.03 for step, wait in zip(times.step_s, times.wait_s, strict=True))
    assert sum(times.step_s) <= times.epoch_s
    assert times.measured_steps == 2
    assert times.epoch_s - times.measured_s >= times.step_s[0]
    assert sum(times.step_s[1:]) <= times.measured_s


def test_ranks_that_are_equally_fast_hardly_wait_at_a_barrier() -> None:
    """Six messages of 1/128 s among 64 ranks; around a ring 126 would follow each other, as long as the epoch."""
    world = World(64, message_s=2**-7)

    def epoch(_: int) -> EpochTimes:
        clock = EpochClock(CPU, control.barrier)
        for _ in clock.steps(range(2)):
            world.spend(0.5)
        return clock.stop()

    assert {(times.epoch_s, times.straggler_s) for times in world.run(epoch)} == {(1.0, 6 * 2**-7)}


def test_an_epoch_that_is_interrupted_has_its_steps_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 1 s and 2 s have ended, the third has begun."""
    stamps = iter([0.0, 0.25, 1.0, 1.0, 1.5, 3.0, 3.0, 3.5])
    monkeypatch.setattr(clock_module, "stamp", lambda device: next(stamps))
    clock = EpochClock(CPU, lambda: None)
    assert clock.so_far().step_s == []
    for step in clock.steps(range(9)):
        if step == 2:
            break
    times = clock.so_far()
    assert times.step_s == [1.0, 2.0]
    assert times.wait_s == [0.25, 0.5]
    assert (len(times.host_wait_s), times.measured_steps) == (2, 0)
    assert math.isnan(times.epoch_s)
    assert math.isnan(times.measured_s)


def timed(times: EpochTimes) -> tuple[float, float, float, list[float], list[float]]:
    """Epoch, its measured part, wait at its end; of each step its time and its wait."""
    return times.epoch_s, times.measured_s, times.straggler_s, list(times.step_s), list(times.wait_s)


def two_ranks(*step_s: tuple[float, float], late_s: float = 0.0, warmup_steps: int = 0) -> list[Any]:
    """What was timed on each rank, whose steps take so long; rank 1 comes later. Nothing else moves a clock."""
    world = World(2)

    def epoch(rank: int) -> Any:
        world.spend(late_s * rank)
        clock = EpochClock(CPU, control.barrier, warmup_steps)
        for step in clock.steps(range(2)):
            world.spend(step_s[rank][step])
        return timed(clock.stop())

    return world.run(epoch)


def test_an_epoch_begins_with_the_last_rank_and_its_closing_wait_is_separate() -> None:
    assert two_ranks((2.0, 3.0), (4.0, 4.0), late_s=10.0) == [
        (5.0, 5.0, 3.0, [2.0, 3.0], [0.0, 0.0]),
        (8.0, 8.0, 0.0, [4.0, 4.0], [0.0, 0.0]),
    ]


def test_all_ranks_start_the_measured_steps_together() -> None:
    assert two_ranks((1.0, 2.0), (9.0, 2.0), warmup_steps=1) == [
        (11.0, 2.0, 0.0, [1.0, 2.0], [0.0, 0.0]),
        (11.0, 2.0, 0.0, [9.0, 2.0], [0.0, 0.0]),
    ]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], EpochTimes]:
    """Two steps, the first a warm-up: 0.25 s of copying the batch, 2 s of computing; the host runs ahead."""
    cuda = FakeCuda(monkeypatch)

    def batches() -> Iterator[int]:
        for step in range(2):
            cuda.launch(0.25, "batch")
            yield step

    clock = EpochClock(DEVICE, cuda.barrier, warmup_steps=1)
    for _ in clock.steps(batches()):
        cuda.launch(2.0, "step")
    times = clock.stop()
    return cuda.calls, times


def test_on_a_gpu_the_host_waits_at_both_ends_and_after_the_warmup_and_at_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, _ = on_a_gpu(monkeypatch)
    together = ["synchronize", "barrier", "now"]
    # The host reads its own clock around its wait for the loader.
    step = ["record", "now", "batch", "now", "record", "step", "record"]
    asking = ["record", "now"]  # for a third batch, that is not there
    reading = ["elapsed"] * 4
    assert calls == [*together, *step, *together, *step, *asking, "synchronize", "now", "barrier", "now", *reading]


def test_on_a_gpu_times_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each barrier takes 0.5 s: the second lies between the two steps, the third after the epoch."""
    _, times = on_a_gpu(monkeypatch)
    assert timed(times) == (5.0, 2.25, 0.5, [2.25, 2.25], [0.25, 0.25])


def test_on_a_gpu_the_steps_so_far_are_those_that_the_device_has_ended_and_the_host_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps of 2 s are queued; half a second later none has ended, after 3 s one has."""
    cuda = FakeCuda(monkeypatch)
    clock = EpochClock(DEVICE, cuda.barrier)
    for step in clock.steps(range(3)):
        if step == 2:
            break
        cuda.launch(2.0, "step")
    waits = cuda.calls.count("synchronize")
    assert clock.so_far().step_s == []
    cuda.host_s += 3.0
    assert clock.so_far().step_s == [2.0]
    assert cuda.calls.count("synchronize") == waits


def test_waits_are_timed_by_the_clock_of_the_steps_and_by_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader takes 3 s of the host's time for each batch, while the device is busy and waits 0.25 and 0.5 s. Its
    stamps are the begin, the arrival of the batch and the end of two steps."""
    stamps, now = iter([0.0, 0.25, 5.0, 5.0, 5.5, 9.0, 9.0]), [100.0]
    monkeypatch.setattr(clock_module, "stamp", lambda device: next(stamps))
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def batches() -> Iterator[Batch | None]:
        now[0] += 3
        yield Batch(torch.zeros(4), torch.zeros(4), torch.ones(4, dtype=torch.bool))
        now[0] += 3
        yield None

    clock = EpochClock(CPU, lambda: None)
    for _ in clock.steps(batches()):
        now[0] += 1
    times = clock.stop()
    assert times.step_s == [5.0, 4.0]
    assert times.wait_s == [0.25, 0.5]
    assert times.host_wait_s == [3.0, 3.0]
    assert times.samples == [4, 0]


def test_a_share_of_waiting_is_1_though_the_device_s_clock_drifts_from_the_host_s() -> None:
    shares = [
        EpochTimes(8.0, 4.0, 0.0, 1, step_s=[4.0, 4.0], wait_s=[1.0, waited]).wait_share for waited in (4.0001, 6.0)
    ]
    assert shares == [1.0, 1.5]  # more than the clocks drift: the record is refused


def test_what_the_loop_s_own_thread_loads_is_known() -> None:
    def computed() -> Iterator[int]:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        yield 0

    for batches, least, most in ((computed(), 0.05, math.inf), (slow(1, 0.1), 0.0, 0.05)):
        clock = EpochClock(CPU, lambda: None)
        for _ in clock.steps(batches):
            pass
        assert least <= clock.stop().loading_s < most


@pytest.mark.gpu
def test_steps_on_the_device_include_work_the_host_did_not_wait_for() -> None:
    device = torch.device("cuda", 0)
    square = torch.randn(8192, 8192, device=device)
    clock = EpochClock(device, lambda: None)
    for _ in clock.steps(range(3)):
        for _ in range(10):
            square = torch.tanh(square @ square)
    times = clock.stop()
    assert sum(times.step_s) == pytest.approx(times.epoch_s, rel=0.05)


@pytest.mark.gpu
def test_a_device_that_waits_for_its_batch_shows_it_and_a_busy_one_does_not() -> None:
    """The host waits 0.1 s for each batch; in the second epoch the device has more work than that."""
    device = torch.device("cuda", 0)
    square = torch.randn(8192, 8192, device=device)
    shares = []
    for products in (0, 30):  # 30 products of 8192 x 8192 in fp32: above 0.3 s on an H200
        clock = EpochClock(device, lambda: None, warmup_steps=1)
        for _ in clock.steps(slow(4, 0.1)):
            for _ in range(products):
                square = torch.tanh(square @ square)
        times = clock.stop()
        shares.append(sum(times.wait_s[1:]) / times.measured_s)
    idle, busy = shares
    assert idle > 0.9
    assert busy < 0.5
