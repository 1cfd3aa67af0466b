"""The boundary between two steps: every rank passes it, and all ranks stop at the same one, because a loss is not
finite, or at a request from a signal or the run's time limit."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.errors import TIME_LIMIT, Diverged, Failure, Stopped
from ddlbench.progress import tell
from ddlbench.ranks.control import AsyncReduction, barrier

REMEDY = "lower recipe.optimizer.lr, lengthen the warm-up (recipe.schedule.warmup_epochs) or set train.clip_norm"
# With the time to record a failure these stay below the 30 s that Slurm and torchrun give a rank.
REACH_S = 10.0  # while the ranks connect: until this rank reaches the store, and once more until all ranks read it
AGREE_S = 4.0  # until all ranks know the boundary; a rank that does not answer has ended, or is stopped
STOP_S = 15.0  # until this rank reaches the boundary
BEHIND_S = 5.0  # from the first rank that reaches it to this one
ONE_SIGNAL_S = 1.0  # a terminal signals the launcher and the ranks, and the launcher signals the ranks again


@dataclass(eq=False)
class Boundary:
    """A heartbeat at every step, a place to stop at, and a vote of all ranks: is a loss not finite?

    Three boundaries, `every` steps apart, make a vote: copy the flag of the losses to the host, send it to all ranks,
    act on the answer. Each picks up what the one before started, so that no step waits for the device or for another
    rank. All ranks stop together: a rank that raised alone would leave the others in a collective. A vote that was sent
    ends without any further call on this rank (docs/adr/0014).

    progressed: called at every step, so that a hang is noticed
    stop: called with a place such as "after step 3 of epoch 0" at every step, every batch of a validation and before
        every epoch; raises Stopped on all ranks (`StopRequest.pass_boundary`)
    before_epoch: called by `begin` on every rank, with the number of the epoch
    """

    device: torch.device
    progressed: Callable[[], None] = lambda: None
    stop: Callable[[str], None] = lambda _: None
    every: int = 50
    before_epoch: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        self.epoch = 0
        self.steps = 0  # of this epoch
        self._losses = torch.empty(0)
        self.reported = 0  # losses of this rank in this epoch
        self.voted_on = 0  # the first of them
        self.looked: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.vote: AsyncReduction | None = None

    def begin(self, epoch: int, steps: int) -> None:
        """Before an epoch of `steps` steps, outside its clock. All ranks wait for each other. Raises Stopped."""
        self.epoch, self.steps, self.looked, self.vote = epoch, 0, None, None
        self.steps_per_epoch, self.reported, self.voted_on = steps, 0, 0
        barrier()
        self.stop(f"before epoch {epoch}")
        self.before_epoch(epoch)

    def heartbeat(self) -> None:
        """Between two pieces of work that are no step of an epoch, as the batches of a validation. Raises Stopped."""
        self.progressed()
        self.stop(f"after the last step of epoch {self.epoch}")

    def pass_step(self, loss: Tensor | None) -> None:
        """After every step of an epoch; loss: a number on the device, None where this rank has none. Raises Diverged
        or Stopped, on every rank."""
        self.progressed()
        self.steps += 1
        self.stop(f"after step {self.steps - 1} of epoch {self.epoch}")
        if loss is not None:
            if self.reported == 0:
                self._losses = torch.empty(self.steps_per_epoch, device=loss.device)
            self._losses[self.reported] = loss  # the host does not wait for it
            self.reported += 1
        if self.steps % self.every:
            return
        self.require_finite()
        not_finite, copied = self.looked or (torch.zeros(1), None)  # the flag of the boundary before
        if copied is not None:
            copied.synchronize()
        # A copy on the CPU is sent by gloo, not by the device's backend.
        self.vote = AsyncReduction(not_finite.clone(), dist.ReduceOp.MAX)
        self.looked = None
        if self.reported > self.voted_on:
            cuda = self.device.type == "cuda"
            not_finite, copied = torch.zeros(1, pin_memory=cuda), torch.cuda.Event() if cuda else None
            not_finite.copy_((~self.losses[self.voted_on :].isfinite()).any(), non_blocking=True)
            if copied is not None:
                copied.record()
            self.looked, self.voted_on = (not_finite, copied), self.reported

    def require_finite(self) -> None:
        """Read the vote that was sent, over all ranks; there is none at an epoch's first boundaries. Called after an
        epoch's last step too. Raises Diverged."""
        vote, self.vote = self.vote, None
        if vote is not None and vote.result()[0]:
            raise Diverged(f"the loss was no longer finite at epoch {self.epoch}, step {self.steps - 1}: {REMEDY}")

    @property
    def losses(self) -> Tensor:
        """This rank's losses in this epoch, in their order: [reported], float32, on their device.

        They are in one tensor. A list would keep one small tensor per step between the large blocks that the step
        frees: on the CPU the next step could not reuse these as a whole, and the process would grow at every step.
        """
        return self._losses[: self.reported]


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
        """The failure of a run that has reached its time limit; returned only once. None once this rank has asked for a
        stop: the ranks then stop within STOP_S."""
        if self.sent is not None or time.perf_counter() < self.limit_at:
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
