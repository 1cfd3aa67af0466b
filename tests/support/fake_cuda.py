"""torch.cuda on a machine without a GPU: a queue of work that the host runs ahead of, and a record of every call.

The order of the calls is what tests assert: on a GPU a missing synchronization gives wrong times and no error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddlbench.measure import clock

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """calls: in their order; host_s: the host's clock; device_s: when the last work in the device's queue will end"""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.host_s = self.device_s = 0.0
        fake = self

        class Event:
            """Passed when all work that was queued before it is done."""

            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                fake.calls.append("record")
                self.at_s = max(fake.host_s, fake.device_s)

            def query(self) -> bool:
                return self.at_s <= fake.host_s

            def elapsed_time(self, end: Event) -> float:
                """Milliseconds, as torch has it; raises before the host knows that both are passed."""
                assert max(self.at_s, end.at_s) <= fake.host_s, "an event is read that the device has not passed"
                fake.calls.append("elapsed")
                return (end.at_s - self.at_s) * 1e3

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", self._synchronize)
        patch.setattr(clock, "time", self)

    def _synchronize(self, device: Any) -> None:
        assert device == DEVICE
        self.calls.append("synchronize")
        self.host_s = max(self.host_s, self.device_s)

    def perf_counter(self) -> float:
        self.calls.append("now")
        return self.host_s

    def barrier(self) -> None:
        """Another rank comes 0.5 s later."""
        self.calls.append("barrier")
        self.host_s += 0.5

    def launch(self, seconds: float, name: str) -> None:
        """Queue work: the host goes on at once."""
        self.calls.append(name)
        self.device_s = max(self.host_s, self.device_s) + seconds


MEMORY: dict[str, Any] = {
    "max_memory_allocated": 300, "max_memory_reserved": 500, "memory_allocated": 200, "memory_reserved": 400,
    "device_memory_used": 900, "reset_peak_memory_stats": None, "reset_accumulated_memory_stats": None,
    "memory_stats": {
        "num_alloc_retries": 3, "num_ooms": 1, "allocation.all.peak": 70, "allocated_bytes.all.peak": 300,
        "reserved_bytes.all.peak": 500, "allocated_bytes.all.current": 200, "reserved_bytes.all.current": 400,
    },
}  # fmt: skip


class FakeMemory:
    """The memory functions of torch.cuda, each with a figure of its own, and a record of every call."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name, value in MEMORY.items():
            patch.setattr(torch.cuda, name, self._returns(name, value), raising=False)

    def _returns(self, name: str, value: Any) -> Any:
        def call(device: Any) -> Any:
            assert device == DEVICE
            self.calls.append(name)
            return value

        return call
