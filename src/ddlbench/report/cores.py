"""Independent pieces of work over the cores of this machine, where there are many."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

FEW = 1_000  # pieces of work that are done before other processes have started
MOST = 8  # processes: a login node is shared
PARTS = 8  # that a process gets one after the other


def over_cores(function: Callable[[Item], Result], items: Sequence[Item], processes: int) -> list[Result]:
    """The results in the order of the items. The function is one of a module; items and results are pickled.

    processes: at most; new ones are started, and not forked, for libraries may have threads by now
    """
    if processes < 2 or len(items) < FEW:
        return list(map(function, items))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        return list(pool.map(function, items, chunksize=-(-len(items) // (PARTS * processes))))


def cores() -> int:
    """That this process may use, at most MOST."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, MOST)
