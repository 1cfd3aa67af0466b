"""A request to stop, from a signal or the run's time limit, and until when the ranks must have stopped."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from ddlbench.errors import TIME_LIMIT, Failure
from ddlbench.progress import tell
from ddlbench.ranks.boundary import StopAgreement
from ddlbench.run.peers import Peers

# With the time to record a failure these stay below the 30 s that Slurm and torchrun give a rank.
REACH_S = 10.0  # while the ranks connect: until this rank reaches the store, and once more until all ranks read it
AGREE_S = 4.0  # until all ranks know the boundary; a rank that does not answer has ended, or is stopped
STOP_S = 15.0  # until this rank is there
BEHIND_S = 5.0  # between the first rank that is there and this one
ONE_SIGNAL_S = 1.0  # a terminal signals the launcher and the ranks, and the launcher signals the ranks again


class StopRequest(StopAgreement):
    """One rank's side of a stop, with the requests that this rank itself makes.

    limit_s: the run's time limit, counted from `began` (of perf_counter)
    sent: the request of this rank; None: it has sent none
    """

    def __init__(self, rank: int, limit_s: float | None = None, began: float = 0.0) -> None:
        super().__init__()
        self.rank, self.limit_s = rank, limit_s
        self.limit_at = math.inf if limit_s is None else began + limit_s
        self.sent: Failure | None = None
        self.since = math.inf  # when this rank sent its request
        self.wait_until = math.inf  # for the main thread, where another rank is at the boundary
        self.reported = False

    def same_signal(self) -> bool:
        """Whether a signal that has just come is the one that came before."""
        return self.sent is not None and time.perf_counter() - self.since < ONE_SIGNAL_S

    def hold(self, failure: Failure) -> None:
        """This rank ends for this reason once the other ranks can be told."""
        self.sent, self.since = failure, time.perf_counter()

    def can_send(self) -> bool:
        """Whether this rank may send a request: only once, and after the first boundary."""
        return self.sent is None and self.passed > 0

    def send(self, failure: Failure, peers: Peers | None) -> None:
        """Request that all ranks stop at a boundary for this reason."""
        self.hold(failure)
        request = replace(failure, doubtful=False)
        if peers is None:
            first = request
            self.decide(self.announce(request) + 1)
        else:
            first = peers.request_stop(request)
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

    def overdue(self, peers: Peers | None) -> Failure | None:
        """The request of this rank if the ranks have not stopped in time, or if no boundary has come yet."""
        waited, period_s = time.perf_counter() - self.since, 2 * peers.period_s if peers else 0.0
        if self.passed == 0:
            late = peers is not None or waited > REACH_S
        else:
            late = waited > (AGREE_S + period_s if self.at is None else STOP_S)
        return self.sent if late else None

    def main_thread_is_coming(self, failure: Failure) -> bool:
        """Whether another rank has ended at the boundary at which this rank's main thread will soon be. A doubtful
        failure is that of a rank that could not come there."""
        if self.at is None or failure.doubtful:
            return False
        self.wait_until = min(self.wait_until, time.perf_counter() + BEHIND_S)
        return time.perf_counter() < self.wait_until
