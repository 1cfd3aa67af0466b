"""Independent pieces of work over the cores of this machine, where there are many."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 8  # processes: a login node is shared
PARTS = 8  # that a process gets one after the other


class Workers:
    """Processes beside this one. They start with the first work that is large enough, and end with the `with` block.

    Functions must belong to a module; their arguments and results are pickled. New processes are spawned, not forked,
    because libraries may have threads by now.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Sequence[Item]], Result], items: Sequence[Item], few: int) -> list[Result]:
        """Apply the function to consecutive parts of the items; the results are in the order of the items. few: the
        first part, which this process does before others have started"""
        if self.processes < 2 or len(items) <= few:
            return [function(items)]
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.processes, multiprocessing.get_context("spawn"))
        size = -(-len(items) // (PARTS * self.processes))
        return list(self._pool.map(function, [items[n : n + size] for n in range(0, len(items), size)]))

    def start(self, function: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Call the function in one of the processes; in this one, at once, where none has started."""
        if self._pool is not None:
            return self._pool.submit(function, *arguments)
        done = Future[Result]()
        done.set_result(function(*arguments))
        return done


def cores() -> int:
    """The number of cores that this process may use, at most MOST."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, MOST)
