"""Signals for a thread: Python's handlers run in the main thread alone, which may be stuck in a collective. And where
each thread is, on standard error: a hang may not come a second time."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Sequence

SHOW = signal.SIGUSR2  # a loader worker prints its stacks (data/loaders/native.py)
PRINTING_S = 0.5  # of the workers


class Signals:
    """Takes these signals while it is open, but those that are ignored, as SIGHUP is by nohup. They may be blocked
    before: from then on they are not."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.reading, self.writing = os.pipe()

    def __enter__(self) -> Signals:
        os.set_blocking(self.writing, False)
        self.wakeup = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        handled = [number for number in self.numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self.handlers = {int(number): signal.signal(number, lambda *_: None) for number in handled}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        os.close(self.reading)
        os.close(self.writing)

    def wait(self, seconds: float) -> int | None:
        """The next signal; None where none comes in time, and after `wake`. Other signals (SIGCHLD) do not count."""
        ready, _, _ = select.select([self.reading], [], [], seconds)
        number = os.read(self.reading, 1)[0] if ready else 0
        return number if number in self.handlers else None

    def wake(self) -> None:
        """End a `wait` of another thread."""
        os.write(self.writing, b"\0")


def print_stacks() -> None:
    """Print the stacks of this rank's threads and of its loader workers. For a process that is about to end: other
    child processes end by the signal."""
    faulthandler.dump_traceback(2)
    workers = multiprocessing.active_children()
    for worker in workers:
        if worker.pid is not None:
            os.write(2, f"{worker.name}, pid {worker.pid}:\n".encode())
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, SHOW)
            time.sleep(PRINTING_S / len(workers))
