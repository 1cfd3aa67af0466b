"""Work divided over processes or threads; only the work in progress is in memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from ddlbench.cores import allowed_cores
from ddlbench.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

MOST_PROCESSES = 16  # default limit: a file system has limits too
SCANNERS = 16  # threads: a parallel file system answers slowly, but many at once


def usual_processes() -> int:
    return min(len(allowed_cores()), MOST_PROCESSES)


def in_processes(work: Callable[[Task], Result], jobs: Iterable[Task], processes: int) -> Iterator[Result]:
    """work(job) of all jobs, in the order in which they finish. `work` must be importable. Raises what `work` raises,
    and UserError where a process dies."""
    # A fork would copy the locks of the caller's threads.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_start)
    try:
        yield from _spread(pool, work, jobs, processes)
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {processes} processes died, perhaps for lack of memory: use fewer processes"
        ) from error


def in_threads(work: Callable[[Task], Result], jobs: Iterable[Task], threads: int) -> Iterator[Result]:
    """work(job) of all jobs, in the order in which they finish. Raises what `work` raises."""
    return _spread(ThreadPoolExecutor(threads), work, jobs, threads)


def _spread(pool: Executor, work: Callable[[Task], Result], jobs: Iterable[Task], workers: int) -> Iterator[Result]:
    """Jobs are taken from their iterator when workers become free."""
    waiting, pending = iter(jobs), set[Future[Result]]()
    try:
        while True:
            pending |= {pool.submit(work, job) for job in islice(waiting, 2 * workers - len(pending))}
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start() -> None:
    """Ctrl-C ends a process at once, and so does the end of its parent; else it would wait for work forever."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(1)


def end_with_parent(exit_code: int) -> None:
    """End this process when its parent ends, which is the process that asked for it, not the forkserver."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process that multiprocessing started"

    def watch() -> None:
        parent.join()
        os._exit(exit_code)

    threading.Thread(target=watch, daemon=True).start()
