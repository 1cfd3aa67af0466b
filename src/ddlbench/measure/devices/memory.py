"""Peak memory of one rank (allocated and reserved by the allocator, in use on the device, resident on the host), and
the C library's heap on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
from pathlib import Path

import torch

from ddlbench.measure.devices.environment import proc_value
from ddlbench.measure.devices.unknown import or_none

PEAKS = (
    "memory_allocated_peak_bytes",
    "memory_reserved_peak_bytes",
    "memory_device_peak_bytes",
    "memory_host_peak_bytes",
    "allocator_retries",
)
BY_STAGE = ("memory_allocated_peak_bytes", "memory_host_peak_bytes")  # of a pipeline: stages differ in what they hold
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_ON_THE_HEAP = 32 * 2**20  # glibc takes no larger threshold on 64 bits: above it each block is the kernel's


def reset_peaks(device: torch.device) -> None:
    """Reset the peaks, so that building the model and searching for algorithms do not count. The host's peak needs
    /proc (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)  # retries
    # proc(5): 5 resets VmHWM to the current resident set. Without that, the peak since the start is an upper bound.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peaks(device: torch.device) -> dict[str, int | None]:
    """Bytes since `reset_peaks`; None for what this device does not report. The device's own figure (NVML) is in use on
    the whole GPU, also by NCCL, DALI and other processes, and it is the current one, not a peak: the caching allocator
    and NCCL free little, so after an epoch it is at its peak."""
    try:
        host = int(proc_value("self/status", "VmHWM").split()[0]) * 1024
    except (OSError, StopIteration):
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type != "cuda":
        return dict.fromkeys(PEAKS) | {"memory_host_peak_bytes": host}
    return {
        "memory_allocated_peak_bytes": torch.cuda.max_memory_allocated(device),
        "memory_reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
        "memory_device_peak_bytes": or_none(lambda: torch.cuda.device_memory_used(device)),
        "memory_host_peak_bytes": host,
        "allocator_retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
    }


def give_back_freed(device: torch.device) -> None:
    """Before the first step: give back the memory that set-up has freed, so that no peak counts it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        keep_freed_memory()


def keep_freed_memory() -> bool:
    """Return free memory to the kernel now, so that no peak counts it, and let glibc keep freed memory from now on: the
    next step reuses the memory that a step frees, without the kernel. False if nothing was done: another C library, or
    the user has set MALLOC_ variables or GLIBC_TUNABLES.

    glibc returns freed memory to the kernel above a threshold, which changes during the process. Whether a training
    step then pays thousands of page faults depends on the order of allocations long before it, not on the framework:
    4 % of a small ResNet-50 step, in one process and not in another that does the same.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if chosen or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    return bool(
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_ON_THE_HEAP)
        # The largest value of the C type `int`.
        and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    )
