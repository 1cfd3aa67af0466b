"""Signals for a thread: Python's handlers run in the main thread alone, which may be stuck in a collective."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence


class Signals:
    """Takes these signals while it is open, but those that are ignored, as SIGHUP is by nohup. They may be blocked
    before: from then on they are not."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.reading, self.writing = os.pipe()

    def __enter__(self) -> Signals:
        os.set_blocking(self.writing, False)
        self.wakeup = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        taken = [number for number in self.numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self.handlers = {int(number): signal.signal(number, lambda *_: None) for number in taken}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        os.close(self.reading)
        os.close(self.writing)

    def wait(self, seconds: float) -> int | None:
        """The next signal; None where none comes in time, and after `wake`. Another one (SIGCHLD) is none."""
        ready, _, _ = select.select([self.reading], [], [], seconds)
        number = os.read(self.reading, 1)[0] if ready else 0
        return number if number in self.handlers else None

    def wake(self) -> None:
        """End a `wait` of another thread."""
        os.write(self.writing, b"\0")
