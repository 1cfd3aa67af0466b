"""What can go wrong with a run, each kind with the status its record gets and the exit code of the program."""

from __future__ import annotations


class RunError(Exception):
    """Ends a run with a status of its own instead of a traceback."""

    status = "error"
    exit_code = 1


class UserError(RunError, ValueError):
    """The configuration or the data cannot be used: one line with the values and the remedy."""

    exit_code = 2


class WrongRankCount(UserError):
    """The batch or the layout does not fit this number of ranks; with another number the configuration may be right."""


class Unsupported(RunError):
    """The framework cannot do what the configuration asks of it."""

    status = "unsupported"
    exit_code = 3


class Unavailable(RunError):
    """A library is missing on this machine: the message says how to install it."""

    status = "unavailable"
    exit_code = 4


class Diverged(RunError):
    """The loss is no longer a finite number."""

    status = "diverged"
    exit_code = 5


class PeerFailed(RunError):
    """Another rank failed first; the message is that rank's."""

    exit_code = 6


class Stopped(RunError):
    """All ranks stopped at one boundary, as one of them asked: after a signal, or at the run's time limit."""

    status = "killed"
    exit_code = 143

    def __init__(self, reason: str, status: str = status, exit_code: int = exit_code) -> None:
        super().__init__(reason)
        self.status, self.exit_code = status, exit_code
