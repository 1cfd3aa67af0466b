"""How long the ranks of a pipeline wait for each other: the measured counterpart of `schedules.bubble`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from statistics import median

import torch

from ddlbench.measure.clock import Stamp, seconds, stamp
from ddlbench.measure.profiling.spans import profiling
from ddlbench.ranks.control import AsyncReduction

Span = tuple[Stamp, Stamp]

RECENT_STEPS = 100  # enough for a median, few enough to keep their events


class BusyClock:
    """Times when this rank's device computes within a schedule; waiting and sending are what is left."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: deque[tuple[Span, list[Span]]] = deque(maxlen=RECENT_STEPS)
        self.spans: list[Span] | None = None
        self.summed: AsyncReduction | None = None  # [steps, 2]: seconds of the schedule, of computing in it

    @contextmanager
    def schedule(self) -> Generator[None]:
        """One run of the schedule, from its first micro batch to its last."""
        begin, self.spans = stamp(self.device), list[Span]()
        yield
        self.steps.append(((begin, stamp(self.device)), self.spans))
        self.spans = None

    @contextmanager
    def computing(self) -> Generator[None]:
        """Work of this rank's device; it counts within a schedule. Also a decorator of a function."""
        begin = stamp(self.device)
        yield
        if self.spans is not None:
            self.spans.append((begin, stamp(self.device)))

    def add_up(self) -> None:
        """At the end of an epoch: start to sum over ranks the times of its recent steps. Every rank calls it. It waits
        for this rank's device and for no other rank, because the clock of the epoch is still on. Nothing is sent in a
        profiled window: its communication is the framework's alone."""
        if not self.steps or profiling():
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        times = [(seconds(*schedule), sum(seconds(*span) for span in spans)) for schedule, spans in self.steps]
        self.steps.clear()
        self.summed = AsyncReduction(torch.tensor(times, dtype=torch.float64))

    def bubble(self) -> float | None:
        """Share of the ranks' time in which they did not compute: the median over the recent steps of the last epoch
        that was added up, None before. Every rank returns the same; it waits until every rank has added up."""
        return median(1 - busy / schedule for schedule, busy in self.summed.result()) if self.summed else None
