"""A request to stop, from a signal or the run's time limit: at which boundary all ranks stop, and until when they must
have stopped."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ddlbench.errors import TIME_LIMIT, Failure, Stopped
from ddlbench.progress import tell

# With the time to record a failure these stay below the 30 s that Slurm and torchrun give a rank.
REACH_S = 10.0  # while the ranks connect: until this rank reaches the store, and once more until all ranks read it
AGREE_S = 4.0  # until all ranks know the boundary; a rank that does not answer has ended, or is stopped
STOP_S = 15.0  # until this rank reaches the boundary
BEHIND_S = 5.0  # from the first rank that reaches it to this one
ONE_SIGNAL_S = 1.0  # a terminal signals the launcher and the ranks, and the launcher signals the ranks again


class StopRequest:
    """One rank's side of a stop at a boundary that no rank has passed. Its main thread passes boundaries, another
    thread sends requests, announces and decides.

    A rank that waits for its device or for another rank cannot take part in a collective, and a vote every few steps
    could take minutes. So threads agree (run/peers.py): each announces how many boundaries its rank has passed. From
    then on its rank waits at the next boundary until all know the answer. The answer is one more than the largest
    number: no rank has passed this boundary, and every rank reaches it, because this needs no work of another rank
    beyond it.

        rank 0    b1  b2  b3 | announces 3           waits at b4 for the answer, goes on      b5 stops
        rank 1    b1  b2  b3  b4 | announces 4       waits at b5 for the answer                  stops

    limit_s: the run's time limit, counted from `began` (of perf_counter)
    request: the reason to stop; None: no rank has asked for a stop
    at: the number of the boundary at which all ranks stop; None: not yet decided
    sent: the request of this rank; None: it has sent none
    """

    def __init__(self, rank: int, limit_s: float | None = None, began: float = 0.0) -> None:
        self.changed = threading.Condition()
        self.passed = 0
        self.request: Failure | None = None
        self.at: int | None = None
        self.rank, self.limit_s = rank, limit_s
        self.limit_at = math.inf if limit_s is None else began + limit_s
        self.sent: Failure | None = None
        self.since = math.inf  # when this rank sent its request
        self.wait_until = math.inf  # for the main thread, where another rank is at the boundary
        self.reported = False

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
                raise Stopped(self.request, where)

    def announce(self, request: Failure) -> int:
        """How many boundaries this rank has passed; from now on it waits at the next one for `decide`."""
        with self.changed:
            self.request = self.request or request
            return self.passed

    def decide(self, at: int) -> None:
        with self.changed:
            self.at = at
            self.changed.notify_all()

    def same_signal(self) -> bool:
        """Whether a signal that has just come is the one that came before."""
        return self.sent is not None and time.perf_counter() - self.since < ONE_SIGNAL_S

    def hold(self, failure: Failure) -> None:
        """This rank ends for this reason once the other ranks can be told."""
        self.sent, self.since = failure, time.perf_counter()

    def can_send(self) -> bool:
        """Whether this rank may send a request: only once, and after the first boundary."""
        return self.sent is None and self.passed > 0

    def send(self, failure: Failure, ask_all: Callable[[Failure], Failure | None] | None) -> None:
        """Request that all ranks stop at a boundary for this reason.

        ask_all: sends it to the other ranks and returns the request that came first; None where there is one rank
        """
        self.hold(failure)
        request = replace(failure, doubtful=False)
        if ask_all is None:
            first = request
            self.decide(self.announce(request) + 1)
        else:
            first = ask_all(request)
        if first == request:
            tell(f"{failure.reason}: all ranks stop after this step; a second signal ends the run at once")

    def received(self) -> Failure | None:
        """The request of any rank, once, as soon as this rank has it: it is recorded before the ranks stop."""
        if self.reported or self.request is None:
            return None
        self.reported = True
        return self.request

    def limit_reached(self) -> Failure | None:
        """The failure of a run that has reached its time limit; returned only once."""
        if time.perf_counter() < self.limit_at:
            return None
        self.limit_at = math.inf
        reason = f"rank {self.rank} reached the time limit of {self.limit_s:g} s (train.time_limit_s)"
        return Failure.with_status("timeout", reason, self.rank, doubtful=True, ended_by=TIME_LIMIT)

    def overdue(self, period_s: float | None) -> Failure | None:
        """The request of this rank if the ranks have not stopped in time, or if no boundary has come yet.

        period_s: of the ranks' heartbeats; None where there is one rank
        """
        waited = time.perf_counter() - self.since
        if self.passed == 0:
            late = period_s is not None or waited > REACH_S
        else:
            late = waited > (AGREE_S + 2 * (period_s or 0.0) if self.at is None else STOP_S)
        return self.sent if late else None

    def main_thread_is_coming(self, failure: Failure) -> bool:
        """Whether another rank has ended at the boundary at which this rank's main thread will soon be. A doubtful
        failure is that of a rank that could not reach it."""
        if self.at is None or failure.doubtful:
            return False
        self.wait_until = min(self.wait_until, time.perf_counter() + BEHIND_S)
        return time.perf_counter() < self.wait_until
