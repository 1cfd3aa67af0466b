"""Where all ranks stop: a boundary that no rank has passed, agreed on without a collective.

A rank that waits for its device or for another rank cannot take part in a collective, and a vote every few steps could
take minutes. So threads agree (run/peers.py): each announces how many boundaries its rank has passed, and with that its
rank passes no boundary more before all know the answer. One more than the largest number is a boundary that no rank has
passed and that every rank reaches, because whatever the others need on the way there is below it.

    rank 0    b1  b2  b3 | announces 3           waits at b4 for the answer, goes on      b5 stops
    rank 1    b1  b2  b3  b4 | announces 4       waits at b5 for the answer                  stops
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass

from ddlbench.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # each stops the run


@dataclass(frozen=True)
class StopRequest:
    """Why the run is to stop: status, reason and `ended_by` for the record, exit code for the processes."""

    status: str
    reason: str
    exit_code: int
    ended_by: str | None = None


class Stop:
    """One rank's side. Its main thread passes boundaries, another thread announces and decides.

    request: None while nobody asks for a stop
    at: the number of the boundary at which all ranks stop; None while it is not known
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.passed = 0
        self.request: StopRequest | None = None
        self.at: int | None = None

    def pass_boundary(self, where: str) -> None:
        """Called by every rank at the same points of a run. Raises Stopped at the one that was agreed on.

        where: as in "after step 3 of epoch 0"
        """
        with self.changed:
            self.passed += 1
            if self.request is None:
                return
            self.changed.wait_for(lambda: self.at is not None)
            if self.passed == self.at:
                request = self.request
                raise Stopped(f"{request.reason}; stopped {where}", request.status, request.exit_code, request.ended_by)

    def announce(self, request: StopRequest) -> int:
        """How many boundaries this rank has passed; from now on it waits at the next one for `decide`."""
        with self.changed:
            self.request = self.request or request
            return self.passed

    def decide(self, at: int) -> None:
        with self.changed:
            self.at = at
            self.changed.notify_all()
