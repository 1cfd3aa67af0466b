"""Independent pieces of work over the cores of this machine, where there are many."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 8  # processes: a login node is shared
PARTS = 8  # that a process gets one after the other


def over_cores(
    function: Callable[[Sequence[Item]], Result], items: Sequence[Item], processes: int, few: int
) -> list[Result]:
    """What the function makes of consecutive parts of the items, in the order of the items. It is one of a module;
    parts and results are pickled.

    processes: at most; new ones are started, and not forked, for libraries may have threads by now
    few:       items that this process has done before others have started: they are one part
    """
    if processes < 2 or len(items) <= few:
        return [function(items)]
    size = -(-len(items) // (PARTS * processes))
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, parts))


def cores() -> int:
    """That this process may use, at most MOST."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, MOST)
