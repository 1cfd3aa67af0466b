"""Threads that compute for so long, and whether this kernel counts their time."""

from __future__ import annotations

import time

import pytest

from ddlbench.measure.devices.unknown import or_none
from ddlbench.measure.devices.usage import thread_seconds

needs_thread_seconds = pytest.mark.skipif(
    or_none(thread_seconds) is None,
    reason="this kernel does not say how long a thread computed and waited for a core (CONFIG_SCHED_INFO)",
)


def compute(seconds: float) -> None:
    """Keep this thread busy for so long by its own clock, whatever else the machine does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
