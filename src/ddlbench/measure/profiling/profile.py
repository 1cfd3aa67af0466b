"""torch's profiler over a window of steps, and where the time of the window goes, on one rank and over all ranks.

Every moment of the window counts once, for the first of these that applies: computation, communication that no
computation overlaps (exposed), waiting for data, idle. So the shares sum to 1. Computation is divided into forward,
backward, update and other, by the span (measure/profiling/spans.py) in which the host launched it; copies between the
host and the device that nothing else overlaps are other.

On the CPU the events are torch's operators, the collectives of gloo's threads ("gloo:all_reduce"), the host's calls of
torch.distributed and its waits for messages, and what frameworks/horovod/core.py reports. On CUDA they are the
kernels and copies of the device: kernels named nccl* communicate, whichever library launched them, and what was
launched while the rank took its batch, or by DALI, is data. It has run on one GPU; kernels of NCCL have not been
recorded yet. A collective or a receive lasts until all data are there: waiting for a slower rank, and so the bubble of
a pipeline, is communication.
"""

from __future__ import annotations

import math
import re
import socket
import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from ddlbench.job import Job, Place
from ddlbench.measure.profiling.spans import BACKWARD, COMMUNICATE, DATA, FORWARD, UPDATE, WAIT, WINDOW, spanned

PARTS = (FORWARD, BACKWARD, UPDATE, COMMUNICATE, DATA)
OTHER = "other"
MOST_PASSES = 400  # of a rank, that a record holds
COLLECTIVES = ("gloo:", "mpi:", "horovod:")  # on the host
# The host's calls: gloo's threads hold a connection while they copy, and a call that starts a message waits for them.
CALLS = ("c10d::", WAIT)
# It ends only when the sender asks for it, which may be long after the data were sent: the sender's waits are counted.
SEND = "gloo:send"
# Operators, and what torch.compile makes of them. Nodes of autograd are left out: hooks in them may wait.
OPERATORS = (
    "aten::", "fsdp::", "torchvision::", "mkldnn::", "bitsandbytes::", "inductor::", "## Call CompiledFxGraph",
)  # fmt: skip
LOADERS = re.compile("dali|nvjpeg|nvimgcodec", re.IGNORECASE)  # kernels of DALI, which decodes on the GPU
HOST_COPIES = ("Memcpy DtoH", "Memcpy HtoD")  # on CUDA: of offloaded tensors, beside the kernels of the passes
DRIVER_CALLS = ("cu", "hip")  # cudaEventRecord, cuLaunchKernel, hipLaunchKernel; names of operators have their library
PASSES = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "update"}
Pass = tuple[str, float, float]


@dataclass(frozen=True)
class Event:
    """What a profiler saw; nanoseconds of one clock.

    device: whether it ran on a stream of the device
    launched: of what ran on the device, when the host launched it; None: not known
    """

    name: str
    begin: int
    end: int
    device: bool = False
    launched: int | None = None


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


@dataclass(frozen=True)
class Seconds:
    """Seconds of one rank's window, or sums of them over ranks. window_s = forward_s + backward_s + update_s +
    other_s + exposed_s + data_s + idle_s; communication_s, overlapped or not, is no part of the sum."""

    window_s: float
    forward_s: float
    backward_s: float
    update_s: float
    other_s: float
    communication_s: float
    exposed_s: float
    data_s: float
    idle_s: float

    @classmethod
    def total(cls, ranks: Iterable[Seconds]) -> Seconds:
        return cls(*map(sum, zip(*map(astuple, ranks), strict=True)))

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s + self.other_s

    def shares(self) -> dict[str, float]:
        """Shares of the window's time, by the names of the tables' columns."""
        seconds = asdict(self) | {"compute_s": self.compute_s}
        return {column: seconds[name] / self.window_s for column, name in SHARES.items()}


SHARES = {
    "compute_share": "compute_s",
    "comm_exposed_share": "exposed_s",
    "data_share": "data_s",
    "idle_share": "idle_s",
    "comm_share": "communication_s",
    "forward_share": "forward_s",
    "backward_share": "backward_s",
    "update_share": "update_s",
    "other_compute_share": "other_s",
}


@dataclass(frozen=True)
class RankWindow:
    """One rank's window.

    host, stage: where it ran. stage is its rank in its pipeline: only ranks with the same one have the same work
    collectives: how many events of communication began in it
    parts: names of the spans that the profiler saw
    passes: of a pipeline's first replica: part, and seconds of its begin and end after that of the window
    """

    rank: int
    host: str
    stage: int
    steps: int
    seconds: Seconds
    collectives: int
    parts: tuple[str, ...]
    passes: tuple[Pass, ...] = ()

    @classmethod
    def of(cls, job: Job, place: Place, steps: int, events: Sequence[Event]) -> RankWindow:
        """events: of every thread and stream; some may be of before the window or after it"""
        on_device = job.device.type == "cuda"
        (window,) = (event for event in events if event.name == WINDOW)
        begun = [event for event in events if window.begin <= event.begin < window.end]
        communication = [event for event in begun if is_communication(event, on_device)]
        parts = tuple(part for part in PARTS if any(event.name == part for event in begun))
        elsewhere = any(at for axis, at in place.coordinates.items() if axis != "pp")
        passes = passes_of(begun, window.begin, on_device) if "pp" in place.coordinates and not elsewhere else ()
        stage, seconds = place.coordinates.get("pp", 0), divide(events, on_device)
        return cls(job.rank, socket.gethostname(), stage, steps, seconds, len(communication), parts, passes)

    def line(self) -> dict[str, Any]:
        """The rank's entry in run.json."""
        seconds = self.seconds
        # What the rank itself took: without exposed communication, in which it may wait for a slower rank.
        own_s = seconds.window_s - seconds.data_s - seconds.exposed_s
        return {
            "rank": self.rank,
            "host": self.host,
            "stage": self.stage,
            "collectives": self.collectives,
            **asdict(seconds),
            "compute_s": seconds.compute_s,
            "own_s": own_s,
            "own_step_s": own_s / self.steps,
            **({"passes": self.passes} if self.passes else {}),
        }


def is_communication(event: Event, on_device: bool) -> bool:
    """Communication that moves data between ranks: on CUDA kernels of NCCL, on the CPU collectives of the libraries."""
    if event.device != on_device:
        return False
    return event.name.startswith("nccl") if on_device else event.name.startswith(COLLECTIVES)


def passes_of(events: Sequence[Event], begin: int, on_device: bool) -> tuple[Pass, ...]:
    """The first MOST_PASSES forward and backward passes of micro batches, and updates, in order; on CUDA from the begin
    of the first kernel that each launched to the end of the last one. begin: of the window, in nanoseconds"""
    spans = sorted((e.begin, e.end, e.name) for e in events if e.name in PASSES and not e.device and e.begin >= begin)
    if on_device:  # as the device ran them; one that launched nothing is left out
        kernels = sorted((e.launched, e.begin, e.end) for e in events if e.device and e.launched is not None)
        host_spans, spans = spans, list[tuple[int, int, str]]()
        for start, end, name in host_spans:
            launched = kernels[bisect_left(kernels, (start,)) : bisect_left(kernels, (end,))]
            if launched:
                spans.append((min(kernel[1] for kernel in launched), max(kernel[2] for kernel in launched), name))
    return tuple((PASSES[name], (start - begin) / 1e9, (end - begin) / 1e9) for start, end, name in spans[:MOST_PASSES])


def divide(events: Sequence[Event], on_device: bool) -> Seconds:
    """Divide the time of the span WINDOW. Between two edges, where events begin or end, nothing changes."""
    spans = sorted((e.begin, e.end, e.name) for e in events if e.name in PARTS and not e.device)
    spent = defaultdict[str, list[tuple[int, int]]](list)  # begin and end of what counts for each part
    for event in events:
        sent, time = is_communication(event, on_device), (event.begin, event.end)
        if event.name in (WINDOW, DATA) and not event.device:
            spent[event.name].append(time)
        elif (sent and event.name != SEND) or (not on_device and event.name.startswith(CALLS)):
            spent[COMMUNICATE].append(time)
        elif event.device == on_device and not sent and (on_device or event.name.startswith(OPERATORS)):
            part = part_at(event.launched if on_device else event.begin, spans)
            if on_device and LOADERS.search(event.name):  # its threads launch them ahead of a step
                part = DATA
            spent[OTHER if part != DATA and event.name.startswith(HOST_COPIES) else part].append(time)
    edges = np.unique([edge for times in spent.values() for time in times for edge in time])
    window = covered(edges, spent[WINDOW])
    communication = covered(edges, spent[COMMUNICATE]) & window
    counted, computed = dict[str, NDArray[np.bool_]](), np.zeros_like(window)
    for part, name in (*PASSES.items(), (OTHER, "other")):
        counted[f"{name}_s"] = covered(edges, spent[part]) & window & ~computed
        computed |= counted[f"{name}_s"]
    exposed = communication & ~computed
    data = covered(edges, spent[DATA]) & window & ~computed & ~exposed
    counted |= {"window_s": window, "communication_s": communication, "exposed_s": exposed, "data_s": data}
    counted["idle_s"] = window & ~computed & ~exposed & ~data
    return Seconds(**{name: int(np.diff(edges)[pieces].sum()) / 1e9 for name, pieces in counted.items()})


def part_at(time: int | None, spans: Sequence[tuple[int, int, str]]) -> str:
    """The part of the step at a time, OTHER where that is not known. spans: sorted (begin, end, part), not nested"""
    place = -1 if time is None else bisect_right(spans, (time, math.inf)) - 1
    if time is None or place < 0 or time >= spans[place][1] or spans[place][2] == COMMUNICATE:
        return OTHER
    return spans[place][2]


def covered(edges: NDArray[np.int64], times: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which pieces between two of the sorted edges lie in any of the times (begin, end), whose ends are edges."""
    begins, ends = np.searchsorted(edges, np.array(times, np.int64).reshape(-1, 2).T)
    changes = np.bincount(begins, minlength=len(edges)) - np.bincount(ends, minlength=len(edges))
    return np.cumsum(changes)[:-1] > 0
