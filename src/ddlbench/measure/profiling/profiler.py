"""torch's profiler over a window of steps; its events as plain data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ddlbench.measure.profiling.profile import Event
from ddlbench.measure.profiling.spans import WAIT, spanned

DRIVER_CALLS = ("cu", "hip")  # cudaEventRecord, cuLaunchKernel, hipLaunchKernel; names of operators have their library


class Profiler:
    """Records while it is entered: the host's operators and its waits for collectives and messages, and on CUDA the
    device's kernels and copies too."""

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)

    def __enter__(self) -> Profiler:
        self._wait = dist.Work.wait
        dist.Work.wait = spanned(WAIT, self._wait)
        with warnings.catch_warnings():
            # torch 2.11 warns of windows before this one, of which there are none. acc_events=True, which it asks for,
            # would build its tree of events.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.stop()
        dist.Work.wait = self._wait

    def events(self) -> list[Event]:
        """The events of all threads and streams, not torch's tree, which takes minutes for a large window."""
        recorded: Any = self._profile.profiler
        return plain_events(recorded.kineto_results.events())

    def save(self, path: Path) -> None:
        """The trace in Chrome's format, which chrome://tracing and ui.perfetto.dev show; packed where it ends in .gz"""
        self._profile.export_chrome_trace(str(path))


def plain_events(events: Sequence[Any]) -> list[Event]:
    """Events from torch's `_KinetoEvent`. An event of the device names the operator that launched it by its number
    (`linked_correlation_id`). Spans of the host that are drawn on the device again are left out.

    Calls of the driver have numbers of their own, which are those of other operators: a call outside of any operator,
    such as the record of an event, must not be taken for one. 0 is the number of the profiler's own overhead, and the
    link of a kernel without an operator.
    """
    begins: dict[int, int] = {}
    for event in events:
        on_host = event.device_type().name == "CPU" and not event.name().startswith(DRIVER_CALLS)
        if on_host and not event.linked_correlation_id():
            begins[event.correlation_id()] = event.start_ns()
    begins.pop(0, None)
    plain: list[Event] = []
    for event in events:
        begin, device = event.start_ns(), event.device_type().name != "CPU"
        launched = begins.get(event.linked_correlation_id()) if device else None
        if not (device and event.is_user_annotation()):
            plain.append(Event(event.name(), begin, begin + event.duration_ns(), device, launched))
    return plain
