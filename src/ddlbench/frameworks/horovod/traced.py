"""Spans of Horovod's all-reduces, which run in a thread that torch's profiler does not see; and how long the training
thread waits for them, because it does so without sleeping (`WaitAndClear` in Horovod 0.28.1,
horovod/torch/mpi_ops_v2.cc).

A span begins when a gradient is handed to Horovod. Its end is seen when the rank waits for this gradient, or when the
next gradient is handed over: within a backward pass it is late by at most the time between two gradients. On CUDA the
kernels of NCCL are counted instead.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from torch.profiler import record_function

from ddlbench.measure.devices.usage import count_busy_wait
from ddlbench.measure.profiling.spans import profiling

NAME = "horovod:all_reduce"


class InFlight:
    """In the place of two functions of Horovod's optimizers. While no profiler is on it times the waits alone.

    library: horovod.torch.optimizer
    poll: whether the all-reduce of a handle has ended
    open: handles in the order of their start, each with its span
    """

    def __init__(self, library: Any, poll: Any) -> None:
        self.start, self.wait, self.poll = library.allreduce_async_, library.synchronize, poll
        self.open: dict[int, AbstractContextManager[object]] = {}
        library.allreduce_async_, library.synchronize = self.started, self.waited

    def started(self, *args: Any, **kwargs: Any) -> int:
        handle: int = self.start(*args, **kwargs)
        if profiling():
            # They end nearly in the order of their start: asking for all of them would cost more than it shows.
            for earlier in list(self.open):
                if not self.poll(earlier):
                    break
                self._end(earlier)
            self.open[handle] = record_function(NAME)
            self.open[handle].__enter__()
        return handle

    def waited(self, handle: int) -> Any:
        began = time.perf_counter()
        result = self.wait(handle)
        count_busy_wait(time.perf_counter() - began)
        self._end(handle)
        return result

    def _end(self, handle: int) -> None:
        span = self.open.pop(handle, None)
        if span is not None:
            span.__exit__(None, None, None)


def trace_horovod() -> None:
    """Once a process, however many models are trained in it."""
    library = import_module("horovod.torch.optimizer")
    if not isinstance(getattr(library.synchronize, "__self__", None), InFlight):
        InFlight(library, import_module("horovod.torch.mpi_ops").poll)
