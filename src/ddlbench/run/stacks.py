"""Where each thread of this rank and of its loader workers is, on standard error: a hang may not come a second time."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time

SHOW = signal.SIGUSR2  # a loader worker prints its stacks (data/loaders/native.py)
PRINTING_S = 0.5  # of the workers


def print_stacks() -> None:
    """For a process that is about to end: other child processes end by the signal."""
    faulthandler.dump_traceback(2)
    workers = multiprocessing.active_children()
    for worker in workers:
        if worker.pid is not None:
            os.write(2, f"{worker.name}, pid {worker.pid}:\n".encode())
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, SHOW)
            time.sleep(PRINTING_S / len(workers))
