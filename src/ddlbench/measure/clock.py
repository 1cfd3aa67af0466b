"""One clock for all frameworks, outside them (measuring rules: Hoefler and Belli, SC'15).

An epoch is timed from a barrier to the moment this rank's device is idle; the closing barrier is timed alone, as the
wait for the slowest rank. Steps are timed by device events on CUDA, read after the epoch, so that no step waits for
the host; on the CPU, where the work is synchronous, by the host's clock.

The data wait of a step is timed by the same clock, from the begin of the step until its batch can be computed on. On
CUDA that is the time in which the compute stream had ended the step before and had no batch: the loader was slow, the
copy had not ended, or images were not normalized yet (loaders/replica_feed.py). A loader that the host waits for while
the device is busy costs nothing and does not count. One batch is fetched ahead: the first step waits for two batches,
the last for none. So after warm-up steps the first measured batch is ready.
The host's own wait for the loader is also timed: on CUDA the two differ, on the CPU they are the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import thread_time
from typing import TypeAlias, TypeVar

import torch

from ddlbench.job import Batch
from ddlbench.measure.devices.meter import Meter, Use
from ddlbench.measure.profiling.spans import DATA, span

Item = TypeVar("Item")
Stamp: TypeAlias = torch.cuda.Event | float
DRIFT = 1e-3  # between the clocks of a device and its host, with margin for the resolution of events


@dataclass(frozen=True)
class EpochTimes:
    """Seconds of one rank's epoch.

    epoch_s:     first barrier to idle device, warm-up steps included
    measured_s:  the same from the end of the warm-up steps (equal to epoch_s where there are none)
    straggler_s: waiting for the slowest rank at the closing barrier
    step_s, wait_s: per step; the seconds of the step in which it waited for its batch
    host_wait_s: per step, the host's wait for the loader
    loading_s:   CPU time of the training thread within these waits, as a loader without workers needs it
    samples:     of each step's batch; 0 without a batch
    use:         what `meter` read at the barriers; None without a meter
    """

    epoch_s: float
    measured_s: float
    straggler_s: float
    warmup_steps: int
    step_s: Sequence[float]
    wait_s: Sequence[float]
    host_wait_s: Sequence[float] = ()
    loading_s: float = 0.0
    samples: Sequence[int] = ()
    use: Use | None = None

    @property
    def measured_steps(self) -> int:
        return len(self.step_s) - self.warmup_steps

    @property
    def steady_s(self) -> float:
        """The measured steps without the epoch's first, which is not among them if there were warm-up steps."""
        return self.measured_s - (0.0 if self.warmup_steps else self.step_s[0])

    @property
    def wait_share(self) -> float:
        """Waiting for data as a share of the measured steps' time. On CUDA the two are of two clocks: a share that they
        make larger than 1 by less than DRIFT is 1."""
        share = sum(self.wait_s[self.warmup_steps :]) / self.measured_s
        return 1.0 if 1.0 < share < 1.0 + DRIFT else share

    @property
    def host_wait_share(self) -> float:
        return sum(self.host_wait_s[self.warmup_steps :]) / self.measured_s


class EpochClock:
    """Times one epoch on one rank: iterate over `steps`, then `stop`.

    meter: read before the opening barrier and after the closing one, outside the times
    reset: called before the first step, and again after the warm-up steps; it resets the peaks of memory
    """

    def __init__(
        self,
        device: torch.device,
        barrier: Callable[[], None],
        warmup_steps: int = 0,
        meter: Meter | None = None,
        reset: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self.barrier = barrier
        self.warmup_steps = warmup_steps
        self.meter = meter
        self.reset = reset
        self.host_wait_s: list[float] = []
        self.loading_s = 0.0
        self.samples: list[int] = []
        self.begins: list[Stamp] = []
        self.ready: list[Stamp] = []  # a step's batch
        self.ends: list[Stamp] = []

    def steps(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches; a step lasts from asking for one to asking for the next."""
        source = iter(batches)
        if self.meter:
            self.meter.begin()
        self.reset()
        self.began = self.measured_from = self._together()
        while True:
            begin, asked, used = stamp(self.device), time.perf_counter(), thread_time()
            if self.meter:
                self.meter.tick(asked)
            try:
                with span(DATA):
                    batch = next(source)
            except StopIteration:
                return
            self.host_wait_s.append(time.perf_counter() - asked)
            self.loading_s += thread_time() - used
            self.samples.append(len(batch.valid) if isinstance(batch, Batch) else 0)
            self.begins.append(begin)
            self.ready.append(stamp(self.device))
            yield batch
            self.ends.append(stamp(self.device))
            if len(self.ends) == self.warmup_steps:
                self.reset()
                self.measured_from = self._together()

    def stop(self) -> EpochTimes:
        """Close the epoch: this rank's device is idle, then all ranks meet."""
        idle(self.device)
        ended = time.perf_counter()
        self.barrier()
        return EpochTimes(
            epoch_s=ended - self.began,
            measured_s=ended - self.measured_from,
            straggler_s=time.perf_counter() - ended,
            warmup_steps=self.warmup_steps,
            step_s=[seconds(begin, end) for begin, end in zip(self.begins, self.ends, strict=True)],
            wait_s=[seconds(begin, ready) for begin, ready in zip(self.begins, self.ready, strict=True)],
            host_wait_s=self.host_wait_s,
            loading_s=self.loading_s,
            samples=self.samples,
            use=self.meter.end() if self.meter else None,
        )

    def so_far(self) -> EpochTimes:
        """The steps of an interrupted epoch that have ended, all as warm-up: their seconds and waits. The host does not
        wait: a step that the device has not ended is left out."""
        ended = sum(1 for _ in takewhile(lambda end: not isinstance(end, torch.cuda.Event) or end.query(), self.ends))
        starts, unknown = self.begins[:ended], math.nan
        return EpochTimes(
            epoch_s=unknown,
            measured_s=unknown,
            straggler_s=unknown,
            warmup_steps=ended,
            step_s=[seconds(*stamps) for stamps in zip(starts, self.ends, strict=False)],
            wait_s=[seconds(*stamps) for stamps in zip(starts, self.ready, strict=False)],
            host_wait_s=self.host_wait_s[:ended],
        )

    def _together(self) -> float:
        """The time at which all ranks have met, each with an idle device."""
        idle(self.device)
        self.barrier()
        return time.perf_counter()


def idle(device: torch.device) -> None:
    """Wait until this rank's device has ended all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stamp(device: torch.device) -> Stamp:
    """A stamp of this moment in the order of the device's work. Neither host nor device waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Stamp, end: Stamp) -> float:
    """Seconds between two stamps of one device, which must have passed both."""
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin
