"""NVML's counters from a fake of the library that records its calls."""
# ruff: noqa: N802 (the names are those of the library)

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddlbench.measure.devices import nvml
from ddlbench.measure.devices.nvml import GpuState, gpu_state_reader, joules, throttling

CUDA = torch.device("cuda", 0)


class Nvml:
    """One GPU at bus 0000000a:0b:00.0. A figure that is an exception is raised."""

    NVML_CLOCK_SM = 1

    def __init__(self, **figures: Any) -> None:
        self.figures = {"energy": 5_000, "clock": 1500, "reasons": 0, "lowered": {}, "mig": [0, 0]} | figures
        self.asked: list[tuple[Any, ...]] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        return f"gpu at {bus}"

    def said(self, name: str, *words: Any) -> Any:
        self.asked.append((name, *words))
        if isinstance(self.figures[name], Exception):
            raise self.figures[name]
        return self.figures[name]

    def nvmlDeviceGetMigMode(self, handle: str) -> Any:
        return self.said("mig", handle)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> Any:
        return self.said("energy", handle)

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> Any:
        return self.said("clock", handle, clock)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> Any:
        return self.said("reasons", handle)

    def nvmlDeviceGetViolationStatus(self, handle: str, policy: int) -> Any:
        return SimpleNamespace(referenceTime=1, violationTime=self.said("lowered", handle)[policy])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    place = SimpleNamespace(pci_domain_id=10, pci_bus_id=11, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(nvml, "nvml", lambda: library)
    return library


def read() -> GpuState:
    reader = gpu_state_reader(CUDA)
    assert reader
    return reader()


def test_the_gpu_of_this_rank_is_read(fake: Nvml) -> None:
    fake.figures["lowered"] = {0: 7, 1: 0, 3: 0, 5: 0}
    assert read() == GpuState(5_000, 1500, 0, {0: 7, 1: 0, 3: 0, 5: 0})
    assert {words[1] for words in fake.asked} == {"gpu at 0000000a:0b:00.0"}
    assert ("clock", "gpu at 0000000a:0b:00.0", Nvml.NVML_CLOCK_SM) in fake.asked


def test_a_device_without_counters_reports_none(fake: Nvml) -> None:
    fake.figures |= dict.fromkeys(("energy", "clock", "reasons", "lowered", "mig"), RuntimeError("Not Supported"))
    assert read() == GpuState(None, None, None, {0: None, 1: None, 3: None, 5: None})
    assert joules(read(), read()) is None
    assert throttling(read(), read()) is None


def test_a_slice_of_a_gpu_has_no_energy_of_its_own(fake: Nvml) -> None:
    fake.figures["mig"] = [1, 1]
    assert read().energy_mj is None


def test_older_libraries_know_the_reasons_by_another_name(fake: Nvml) -> None:
    fake.figures["reasons"] = AttributeError("nvmlDeviceGetCurrentClocksEventReasons")
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x20  # type: ignore[attr-defined]
    assert read().reasons == 0x20


def test_a_cpu_and_a_machine_without_nvml_have_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_state_reader(torch.device("cpu")) is None
    monkeypatch.setattr(nvml, "nvml_handle", lambda device: 1 / 0)
    assert gpu_state_reader(CUDA) is None


def state(energy: int = 0, reasons: int = 0, **lowered: int) -> GpuState:
    lowered_ns: dict[int, int | None] = dict.fromkeys(nvml.POLICIES, 0)
    return GpuState(energy, 1500, reasons, lowered_ns | {int(key[1:]): lowered[key] for key in lowered})


def test_energy_is_in_joules_and_a_counter_that_went_back_is_none() -> None:
    assert joules(state(5_000), state(7_500)) == 2.5
    assert joules(state(7_500), state(5_000)) is None


def test_reasons_before_after_and_in_between() -> None:
    assert throttling(state(), state()) == ()
    assert throttling(state(reasons=0x1 | 0x2 | 0x100), state()) == ()  # idle, clocks set by the user, a display
    assert throttling(state(reasons=0x4), state()) == ("power cap",)
    assert throttling(state(), state(reasons=0x40 | 0x4)) == ("power cap", "thermal slowdown by hardware")
    assert throttling(state(_1=10), state(_1=10)) == ()
    assert throttling(state(_1=10), state(_1=11)) == ("thermal slowdown",)


def test_the_names_are_those_of_the_library() -> None:
    """By the constants of the installed package."""
    library = pytest.importorskip("pynvml")
    bits = {
        "SwPowerCap": "power cap", "HwSlowdown": "hardware slowdown", "SyncBoost": "sync boost",
        "SwThermalSlowdown": "thermal slowdown by software", "HwThermalSlowdown": "thermal slowdown by hardware",
        "HwPowerBrakeSlowdown": "power brake", "BoardLimit": "board limit", "Reliability": "reliability",
    }  # fmt: skip
    assert {getattr(library, f"nvmlClocksThrottleReason{name}"): word for name, word in bits.items()} == nvml.REASONS
    policies = {
        "POWER": "power cap", "THERMAL": "thermal slowdown", "BOARD_LIMIT": "board limit", "RELIABILITY": "reliability",
    }  # fmt: skip
    assert {getattr(library, f"NVML_PERF_POLICY_{name}"): word for name, word in policies.items()} == nvml.POLICIES


@pytest.mark.gpu
def test_a_real_gpu_counts_energy_while_it_computes() -> None:
    device = torch.device("cuda", 0)
    reader = gpu_state_reader(device)
    if reader is None:
        pytest.skip("NVML cannot be reached")
    before, square = reader(), torch.randn(8192, 8192, device=device)
    if before.energy_mj is None:
        pytest.skip("this GPU has no energy counter, or is a slice of one")
    for _ in range(200):
        square = torch.tanh(square @ square)
    torch.cuda.synchronize(device)
    energy = joules(before, reader())
    assert energy is not None
    assert energy > 10
