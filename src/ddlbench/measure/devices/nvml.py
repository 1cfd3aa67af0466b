"""What torch, the driver and NVML say of a GPU: model, limits and connections; and while it works energy, clock, and
why the clock was lowered.

Tested with a recorded fake of the library and on one GPU (tests/measure/devices/test_nvml.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddlbench.measure.devices.unknown import or_none

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
# NVML's levels of the nearest common ancestor of two GPUs, in the letters of `nvidia-smi topo -m`
TOPOLOGY = {0: "SAME", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def gpu(device: torch.device) -> dict[str, Any]:
    """The GPU of this rank, and how the GPUs of the node are connected; all null on a CPU."""
    cuda = device.type == "cuda"
    properties = or_none(lambda: torch.cuda.get_device_properties(device)) if cuda else None
    handle = or_none(lambda: nvml_handle(device)) if cuda else None
    facts: dict[str, Callable[[Any], Any]] = {
        "driver": lambda _: nvml().nvmlSystemGetDriverVersion(),
        "gpu_power_limit_w": lambda gpu: nvml().nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        "gpu_power_limit_default_w": lambda gpu: nvml().nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
        "gpu_persistence": lambda gpu: bool(nvml().nvmlDeviceGetPersistenceMode(gpu)),
        "gpu_clock_mhz": lambda gpu: nvml().nvmlDeviceGetClockInfo(gpu, nvml().NVML_CLOCK_SM),
        "gpu_clock_max_mhz": lambda gpu: nvml().nvmlDeviceGetMaxClockInfo(gpu, nvml().NVML_CLOCK_SM),
        "gpu_memory_clock_mhz": lambda gpu: nvml().nvmlDeviceGetClockInfo(gpu, nvml().NVML_CLOCK_MEM),
        "gpu_memory_clock_max_mhz": lambda gpu: nvml().nvmlDeviceGetMaxClockInfo(gpu, nvml().NVML_CLOCK_MEM),
        "gpu_ecc": lambda gpu: bool(nvml().nvmlDeviceGetEccMode(gpu)[0]),
        "topology": lambda _: topology(),
    }
    return {
        "cudnn": or_none(torch.backends.cudnn.version) if cuda else None,
        "cuda_module_loading": or_none(module_loading) if properties else None,
        "gpu_model": properties.name if properties else None,
        "gpu_memory_total_bytes": properties.total_memory if properties else None,
        **{name: or_none(lambda read=read: read(handle)) if handle else None for name, read in facts.items()},
    }


def module_loading() -> str:
    """When the driver loads kernels: `lazy`, at their first use, or `eager`; CUDA_MODULE_LOADING chooses. The driver
    must be initialized."""
    driver = ctypes.CDLL("libcuda.so.1")
    mode = ctypes.c_int()
    if error := driver.cuModuleGetLoadingMode(ctypes.byref(mode)):
        raise OSError(error, "cuModuleGetLoadingMode")
    return {1: "eager", 2: "lazy"}[mode.value]  # CUmoduleLoadingMode of cuda.h


def nvml() -> Any:
    """NVIDIA's management library; raises where there is no driver."""
    import pynvml  # here: machines without an NVIDIA GPU never need it

    pynvml.nvmlInit()
    return pynvml


def nvml_handle(device: torch.device) -> Any:
    """NVML's handle of a torch device, by its PCI address: CUDA_VISIBLE_DEVICES renumbers torch's devices only."""
    place: Any = torch.cuda.get_device_properties(device)
    bus = f"{place.pci_domain_id:08x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
    return nvml().nvmlDeviceGetHandleByPciBusId(bus)


def topology() -> list[list[str]]:
    """How each two GPUs of the node are connected over PCIe, visible to this process or not: [gpu][gpu]."""
    library = nvml()
    gpus = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
    nearest = library.nvmlDeviceGetTopologyCommonAncestor
    return [["X" if a is b else TOPOLOGY[nearest(a, b)] for b in gpus] for a in gpus]


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
        return None  # the counter restarts at 0 when the driver is loaded
    return (after.energy_mj - before.energy_mj) / 1000


def throttling(before: GpuState, after: GpuState) -> tuple[str, ...] | None:
    """Why the clock was lower than the device would run: at one of the two moments, or by a counter in between. None
    where the device reports neither."""
    bits = [state.reasons for state in (before, after) if state.reasons is not None]
    pairs = {policy: (before.lowered_ns[policy], after.lowered_ns[policy]) for policy in POLICIES}
    grown = {policy: b - a for policy, (a, b) in pairs.items() if a is not None and b is not None}
    if not bits and not grown:
        return None
    named = {name for bit, name in REASONS.items() if any(value & bit for value in bits)}
    return tuple(sorted(named | {POLICIES[policy] for policy, more in grown.items() if more > 0}))
