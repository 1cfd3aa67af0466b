"""Peaks of one rank: of this process as the kernel has them, of a GPU by a fake of torch.cuda's counters. And a step
that allocates what the step before freed pays no page faults for it."""

from __future__ import annotations

import gc
import json
import mmap
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddlbench.measure.devices import environment, memory
from ddlbench.measure.devices.memory import PEAKS, give_back_freed, keep_freed_memory, peaks, reset_peaks
from tests.support.fake_cuda import DEVICE, FakeMemory
from tests.support.waiting import WITHIN_S

CPU = torch.device("cpu")
BLOCK = 192 * 2**20  # bytes; far more than what else changes meanwhile


def host_peak() -> int:
    peak = peaks(CPU)["memory_host_peak_bytes"]
    assert peak is not None
    return peak


def kernel(field: str) -> int:
    """Bytes, as /proc/self/status has them in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith(field))


def use(size: int) -> None:
    """Touch every page of so many bytes, and give them back to the kernel."""
    with mmap.mmap(-1, size) as block:
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1


def test_the_hosts_peak_stays_after_the_memory_is_given_back() -> None:
    reset_peaks(CPU)
    before = host_peak()
    use(BLOCK)
    assert host_peak() > before + 0.9 * BLOCK


def test_a_reset_starts_from_what_is_resident_now() -> None:
    use(BLOCK)
    before = host_peak()
    reset_peaks(CPU)
    gc.collect()
    assert host_peak() < before - 0.5 * BLOCK
    assert host_peak() >= kernel("VmRSS:") - 0.1 * BLOCK


def test_the_kernels_kib_are_1024_bytes() -> None:
    low = kernel("VmHWM:")
    peak = host_peak()
    assert low <= peak <= kernel("VmHWM:")


def test_without_proc_the_peak_since_the_start_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    low = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    for module in (memory, environment):
        monkeypatch.setattr(module, "Path", lambda *names: tmp_path / "/".join(names).lstrip("/"))
    peak = host_peak()
    assert low <= peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    reset_peaks(CPU)  # cannot, and does not fail


def test_a_cpu_reports_no_device() -> None:
    result = peaks(CPU)
    assert tuple(result) == PEAKS
    assert [name for name, value in result.items() if value is not None] == ["memory_host_peak_bytes"]


def test_a_gpus_peaks_are_the_allocators_own_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMemory(monkeypatch)
    monkeypatch.setattr(memory, "proc_value", lambda *_: "2 kB")
    assert peaks(DEVICE) == {
        "memory_allocated_peak_bytes": 300,
        "memory_reserved_peak_bytes": 500,
        "memory_device_peak_bytes": 900,
        "memory_host_peak_bytes": 2048,
        "allocator_retries": 3,
    }


def test_a_reset_on_a_gpu_resets_the_allocators_peaks_and_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMemory(monkeypatch)
    reset_peaks(DEVICE)
    assert fake.calls == ["reset_peak_memory_stats", "reset_accumulated_memory_stats"]


def test_what_set_up_has_freed_on_a_gpu_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    give_back_freed(DEVICE)
    assert calls == ["empty_cache"]


# Page faults of ten steps, before freed memory is kept and after. Six blocks of 9 MiB are freed together: more than
# glibc keeps by itself at the top of its heap.
STEPS = """
import json, resource
from ddlbench.measure.devices.memory import keep_freed_memory

def step():
    blocks = [bytearray(9 * 2**20) for _ in range(6)]

def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps([faults(), keep_freed_memory(), faults()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_taken_again_without_page_faults() -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    without, kept, faults = json.loads(done.stdout)
    assert kept
    assert without > 10 * 9 * 2**20 / 4096 > 100 * faults


def test_the_users_own_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert keep_freed_memory() is False
