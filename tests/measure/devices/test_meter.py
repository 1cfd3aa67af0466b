from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddlbench.measure import clock as clock_module
from ddlbench.measure.clock import EpochClock
from ddlbench.measure.devices import meter as meter_module
from ddlbench.measure.devices.meter import Meter, Rapl, Use, over_ranks
from ddlbench.measure.devices.nvml import GpuState
from ddlbench.measure.devices.usage import Load, thread_seconds
from tests.support.busy import compute, needs_thread_seconds

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def zone(folder: Path, number: str, name: str, joules: float, range_j: float = 1000.0) -> Path:
    """The energy counter of a processor as the kernel shows it, in a folder of the test."""
    made = folder / f"intel-rapl:{number}"
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "max_energy_range_uj").write_text(f"{int(range_j * 1e6)}\n")
    set_energy(made, joules)
    return made


def set_energy(made: Path, joules: float) -> None:
    (made / "energy_uj").write_text(f"{int(joules * 1e6)}\n")


def test_the_meter_is_read_outside_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute in each reading is in no second of the epoch."""
    events, now = list[str](), [0.0]

    class Slow:
        """A meter that notes when it is read."""

        def begin(self) -> None:
            events.append("begin")
            now[0] += 60

        def tick(self, now: float) -> None:
            events.append("tick")

        def end(self) -> str:
            events.append("end")
            now[0] += 60
            return "use"

    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = EpochClock(CPU, lambda: events.append("barrier"), 1, Slow())  # type: ignore[arg-type]
    for _ in clock.steps(range(2)):
        events.append("step")
        now[0] += 1
    times = clock.stop()
    assert times.use == "use"  # type: ignore[comparison-overlap]
    opening, warm = ["begin", "barrier"], ["tick", "step", "barrier"]
    assert events == [*opening, *warm, "tick", "step", "tick", "barrier", "end"]
    assert (times.epoch_s, times.straggler_s, times.step_s) == (2.0, 0.0, [1.0, 1.0])


def test_energy_of_the_packages_between_the_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = zone(tmp_path, "0", "package-0", 900, range_j=1000)
    rapl = Rapl.open(tmp_path)
    seconds = iter([10.0, 14.0])
    monkeypatch.setattr(meter_module, "Rapl", SimpleNamespace(open=lambda: rapl))
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    meter = Meter(CPU, leader=True)
    set_energy(package, 920)
    meter.begin()
    set_energy(package, 970)
    meter.tick(69.9)  # not yet a minute
    meter.tick(70.0)
    set_energy(package, 20)  # began again
    meter.tick(130.0)
    set_energy(package, 990)  # only the reading before shows that the counter began again
    use = meter.end()
    assert (use.energy_j, use.energy_source, use.seconds, use.counts_energy) == (50 + 50 + 970, "rapl", 4.0, True)


def test_one_rank_of_a_node_reads_what_the_node_has_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(meter_module, "Rapl", SimpleNamespace(open=lambda: opened.append(True)))
    for leader in (True, False):
        meter = Meter(CPU, leader)
        meter.begin()
        use = meter.end()
        assert use.counts_energy == leader
        assert isinstance(use.before, Load) == isinstance(use.after, Load) == leader
        assert use.energy_j is None
    assert opened == [True]


def test_a_gpu_is_read_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    unlowered: dict[int, int | None] = dict.fromkeys((0, 1, 3, 5), 0)
    states = iter([GpuState(1_000, 1980, 0, unlowered), GpuState(61_000, 1410, 0x4, unlowered)])
    monkeypatch.setattr(meter_module, "gpu_state_reader", lambda device: lambda: next(states))
    meter = Meter(CUDA, leader=False)
    meter.begin()
    use = meter.end()
    assert (use.energy_j, use.energy_source, use.counts_energy) == (60.0, "nvml", True)
    assert (use.clock_before_mhz, use.clock_after_mhz, use.throttled) == (1980, 1410, ("power cap",))
    assert use.thread_s is None  # the host's thread is not the device


@needs_thread_seconds
def test_a_thread_s_seconds_are_its_computing_and_no_sleep() -> None:
    before, began = thread_seconds(), time.perf_counter()
    other = threading.Thread(target=lambda: sum(range(10**6)))
    other.start()
    other.join()
    time.sleep(0.2)
    compute(0.1)
    used, passed = thread_seconds() - before, time.perf_counter() - began
    assert 0.1 <= used <= passed - 0.2


def test_a_rank_s_own_seconds_have_none_of_the_readings_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that reads for its node would seem slow in a short epoch."""
    computed = [0.0]

    def looked() -> Load:
        computed[0] += 5.0
        return Load(0.0, 0.0, (0, 0, 100))

    monkeypatch.setattr(meter_module, "thread_seconds", lambda: computed[0])
    monkeypatch.setattr(meter_module, "Load", SimpleNamespace(now=looked))
    meter = Meter(CPU, leader=True)
    meter.begin()
    computed[0] += 2.0
    assert meter.end().thread_s == 2.0


def use(energy_j: float | None = None, seconds: float = 10.0, counts: bool = True, source: str = "nvml") -> Use:
    return Use(seconds, counts, energy_j, source if energy_j is not None else None)


def test_energy_is_the_sum_of_all_counters_or_unknown() -> None:
    summed = over_ranks([use(100.0), use(50.0, seconds=11.0)], ["a", "a"])
    assert (summed["energy_j"], summed["energy_source"], summed["energy_time_s"]) == (150.0, "nvml", 11.0)
    assert over_ranks([use(100.0), use(None)], ["a", "a"])["energy_j"] is None  # a GPU without a counter
    packages = [use(100.0, source="rapl"), use(counts=False, seconds=99.0), use(40.0, source="rapl"), use(counts=False)]
    assert over_ranks(packages, ["a", "a", "b", "b"])["energy_j"] == 140.0
    assert over_ranks(packages, ["a", "a", "b", "b"])["energy_time_s"] == 10.0
    assert over_ranks([use(counts=False)], ["a"])["energy_j"] is None
    assert set(over_ranks([None, None], ["a", "b"]).values()) == {None, ()}


def test_cpu_time_and_sent_bytes_are_the_sums_of_all_ranks_or_unknown() -> None:
    figures = ((1.0, 3.5, 3_000), (2.0, 7.0, 500))
    ranks = [replace(use(), cpu_before_s=one, cpu_after_s=other, sent_bytes=sent) for one, other, sent in figures]
    for more, expected in ([], (7.5, 3_500)), ([replace(use(), cpu_after_s=1.0)], (None, None)), ([None], (None, None)):
        line = over_ranks([*ranks, *more], ["a", "b", "b"][: 2 + len(more)])
        assert (line["cpu_time_s"], line["sent_bytes"]) == expected


def test_clocks_are_the_lowest_and_reasons_those_of_all() -> None:
    slow = replace(use(), clock_before_mhz=1980, clock_after_mhz=1200, throttled=("power cap", "board limit"))
    fast = replace(use(), clock_before_mhz=1900, clock_after_mhz=1980, throttled=())
    first = replace(use(), clock_before_mhz=1950, clock_after_mhz=1500)
    line = over_ranks([first, slow, fast, use()], ["a", "a", "b", "b"])
    assert (line["device_clock_before_mhz"], line["device_clock_after_mhz"]) == (1900, 1200)
    assert line["throttled"] == ("board limit", "power cap")


def test_a_nodes_load_knows_what_all_ranks_on_the_node_computed() -> None:
    load = Load(0.0, 0.0, (0, 50, 100))
    leader = replace(use(), cpu_before_s=1.0, cpu_after_s=5.0, before=load, after=load)
    other = replace(use(), cpu_before_s=2.0, cpu_after_s=7.0)
    # Ranks of two nodes in turn, rank 0's node without a figure of its second rank.
    uses = [leader, leader, replace(other, cpu_after_s=None), other]
    first, second = over_ranks(uses, ["a", "b", "a", "b"])["loads"]
    assert (first[0].own_s, first[1].own_s) == (3.0, None)
    assert (second[0].own_s, second[1].own_s) == (3.0, 12.0)
    assert second[0] == replace(load, own_s=3.0)


def test_energy_is_the_sum_over_packages_without_parts_and_platform(tmp_path: Path) -> None:
    zones = [
        zone(tmp_path, "0", "package-0", 10),
        zone(tmp_path, "1", "package-1", 500),
        zone(tmp_path, "0:0", "core", 7),
        zone(tmp_path, "0:1", "dram", 3),
        zone(tmp_path, "2", "psys", 900),
    ]
    meter = Rapl.open(tmp_path)
    assert meter
    assert meter.joules() == 0
    for each, joules in zip(zones, (15, 520, 100, 100, 950), strict=True):
        set_energy(each, joules)
    assert meter.joules() == 5 + 20
    assert meter.joules() == 25  # since it was opened


@pytest.mark.parametrize("broken", ["none", "unreadable", "garbled"])
def test_counters_that_cannot_be_read_give_no_meter(tmp_path: Path, broken: str) -> None:
    if broken != "none":
        zone(tmp_path, "0", "package-0", 10)
        second = zone(tmp_path, "1", "package-1", 10)  # one of two packages would be half the energy
        (second / "energy_uj").unlink()
        if broken == "garbled":
            (second / "energy_uj").write_text("no number")
        else:
            (second / "energy_uj").mkdir()  # an OSError for root, too
    assert Rapl.open(tmp_path) is None
