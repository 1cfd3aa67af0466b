"""What NVML counts and reports of one GPU while it works: energy, clock, and why the clock was lowered.

Tested with a recorded fake of the library and on one GPU (tests/measure/devices/test_nvml.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddlbench.measure.devices.environment import nvml, nvml_handle, or_none

# nvml.h, nvmlClocksEventReasons: those that mean a clock below the one that the device would run. Left out are idle
# (0x1), clocks that the user has set (0x2) and clocks that a display has set (0x100).
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
# nvml.h, nvmlPerfPolicyType: time spent below the clock for each policy, counted since the driver was loaded
POLICIES = {0: "power cap", 1: "thermal slowdown", 3: "board limit", 5: "reliability"}


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU at one moment; None for what the device does not report.

    energy_mj:  millijoules since the driver was loaded, of the whole GPU, whichever process uses it
    clock_mhz:  of the streaming multiprocessors
    reasons:    bits of REASONS and others
    lowered_ns: by policy, time since the driver was loaded in which it had lowered the clock
    """

    energy_mj: int | None
    clock_mhz: int | None
    reasons: int | None
    lowered_ns: dict[int, int | None]


def gpu_state_reader(device: torch.device) -> Callable[[], GpuState] | None:
    """Reads the state of a torch device; None where NVML or the device cannot be reached."""
    handle = or_none(lambda: nvml_handle(device)) if device.type == "cuda" else None
    if handle is None:
        return None
    library = nvml()
    sliced = or_none(lambda: bool(library.nvmlDeviceGetMigMode(handle)[0])) or False

    def read() -> GpuState:
        # nvml.h renamed throttle reasons to event reasons; older drivers and packages know the older name alone.
        reasons = or_none(lambda: library.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if reasons is None:
            reasons = or_none(lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return GpuState(
            # The counter is the whole GPU's: other slices of it may belong to other users.
            energy_mj=None if sliced else or_none(lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle)),
            clock_mhz=or_none(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
            reasons=reasons,
            lowered_ns={
                policy: or_none(
                    lambda policy=policy: library.nvmlDeviceGetViolationStatus(handle, policy).violationTime
                )
                for policy in POLICIES
            },
        )

    return read


def joules(before: GpuState, after: GpuState) -> float | None:
    if before.energy_mj is None or after.energy_mj is None or after.energy_mj < before.energy_mj:
        return None  # the counter begins again when the driver is loaded
    return (after.energy_mj - before.energy_mj) / 1000


def throttling(before: GpuState, after: GpuState) -> list[str] | None:
    """Why the clock was lower than the device would run: at one of the two moments, or by a counter in between. None
    where the device reports neither."""
    bits = [state.reasons for state in (before, after) if state.reasons is not None]
    pairs = {policy: (before.lowered_ns[policy], after.lowered_ns[policy]) for policy in POLICIES}
    grown = {policy: b - a for policy, (a, b) in pairs.items() if a is not None and b is not None}
    if not bits and not grown:
        return None
    named = {name for bit, name in REASONS.items() if any(value & bit for value in bits)}
    return sorted(named | {POLICIES[policy] for policy, more in grown.items() if more > 0})
