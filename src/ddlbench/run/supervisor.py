"""When a rank fails: which rank caused it, which rank records it, and how every process ends in time.

A rank stuck in a collective cannot be reached by Python's own signal handlers (they run between bytecodes), so a thread
watches for signals, for the other ranks' failures (peers.py) and for a main thread that no longer moves. A timer that
needs no Python ends a process in which that thread cannot run either. A process that hangs prints where each of its
threads is, because a hang may not come a second time.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from torch._C._distributed_c10d import Store

from ddlbench.errors import SIGNAL, SIGNALS, TIME_LIMIT, Failure, PeerFailed, Stopped
from ddlbench.progress import tell
from ddlbench.ranks.boundary import REACH_S, StopRequest
from ddlbench.ranks.control import without_timeout
from ddlbench.ranks.launch import group_timeout
from ddlbench.record.files import end_for_rank_0
from ddlbench.run.context import Attempt
from ddlbench.run.peers import STOP, Peers

PERIOD_S = 0.25
NO_STEP = "no step ended"
READERS_S = 3.0  # how long a failing rank stays for the others, at most
GRACE_S = 5.0  # for the main thread to end by itself, once the failure of another rank is recorded
CLOSING_S = 60.0  # at most, for closing what a run had open, once its end is recorded
# A call that holds the GIL for longer than train.timeout_s and this ends the process. The rank sends no heartbeat
# meanwhile: after train.timeout_s the other ranks end the run in any case, and find and record the cause in this time.
# Shorter calls that hold the GIL (imports, a garbage collection, a fork, loading a CUDA module) are no fault.
FROZEN_S = 15.0
SHOW = signal.SIGUSR2  # a loader worker prints its stacks (data/loaders/native.py)
PRINTING_S = 0.5  # of the workers


class Signals:
    """Receives SIGNALS for a thread until it is closed, except those that the process ignores, as SIGHUP under nohup.
    Signals that were blocked before are no longer blocked."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        self.wakeup = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self.handlers = {int(number): signal.signal(number, lambda *_: None) for number in handled}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)

    def close(self) -> None:
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        os.close(self.reading)
        os.close(self.writing)

    def wait(self, seconds: float) -> int | None:
        """The next signal; None if none comes in time. Other signals (SIGCHLD) do not count."""
        ready, _, _ = select.select([self.reading], [], [], seconds)
        number = os.read(self.reading, 1)[0] if ready else 0
        return number if number in self.handlers else None


class Supervisor:
    """A thread that ends this process, the reason recorded, when another rank failed or no longer responds, or when the
    main thread does not move. A signal and the run's time limit stop all ranks at a boundary; a second signal ends this
    process at once."""

    def __init__(self, attempt: Attempt, timeout_s: float, limit_s: float | None = None) -> None:
        """limit_s: the run's own time limit"""
        self.attempt = attempt
        self.rank, self.world_size = attempt.launch.rank, attempt.launch.world_size
        self.timeout_s = timeout_s
        self.stop = StopRequest(self.rank, limit_s, attempt.started)  # this rank's boundaries ask it
        self.peers: Peers | None = None
        self.connected = self.world_size == 1
        self.progress_at, self.within_s = time.perf_counter(), math.inf
        self.when_late: Callable[[], None] = lambda: None  # the main thread has said nothing for `within_s`
        self.waiting = threading.Lock()
        self.waited = False
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._supervise, name="ddlbench-supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self.signals = Signals()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        os.write(self.signals.writing, b"\0")  # the thread need not wait for a signal
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.leave()
        self.signals.close()

    def reach(self, store: Store) -> None:
        """From now on look for other ranks' failures, while the ranks connect."""
        if self.world_size > 1:
            self.peers = Peers(store.clone(), self.rank, self.world_size, self.stop)

    def connect(self) -> None:
        """All ranks are connected: from now on also look for a rank that sends no heartbeat for `timeout_s`."""
        if self.peers is not None:
            self.peers.next_changed = time.perf_counter()
        self.connected = True
        self.expect_nothing()

    def leave(self) -> None:
        """From now on do not look for failures of other ranks: the run has ended."""
        peers, self.peers = self.peers, None
        self.expect_nothing()
        if peers is not None:
            peers.close()

    def expect(self, what: str, more_s: float = 0.0) -> None:
        """From now on a main thread that says nothing for `timeout_s` and `more_s` hangs: a wait for a GPU raises
        nothing. what: as in "no step ended"."""
        self.progressed()
        self.within_s = self.timeout_s + more_s
        limit = "train.timeout_s" + (f" + {more_s:g}" if more_s else "")
        reason = f"rank {self.rank}: {what} within {self.within_s:g} s ({limit})"
        late = Failure.with_status("timeout", reason, self.rank, doubtful=True)
        self.when_late = partial(self._fail, late, begun=True)

    def expect_end(self, code: int) -> None:
        """The end is recorded, and this process is to exit with `code`, also if what it has open does not close."""
        self.progressed()
        self.within_s = within_s = min(self.timeout_s, CLOSING_S)

        def leave_open() -> None:
            waited = f"what the run had open was not closed within {within_s:g} s after its end was recorded"
            tell(f"warning: rank {self.rank}: {waited}")
            print_stacks()
            os._exit(code)

        self.when_late = leave_open

    def expect_nothing(self) -> None:
        """From now on the main thread may take the time it needs, while every other rank sends heartbeats."""
        self.within_s = math.inf

    @contextmanager
    def unlimited(self) -> Generator[None]:
        """Between two steps the main thread and its collectives may take the time they need, while every other rank
        sends heartbeats."""
        self.expect_nothing()
        with without_timeout(group_timeout(self.attempt.device, self.timeout_s)):
            yield
        self.expect(NO_STEP)

    def progressed(self) -> None:
        self.progress_at = time.perf_counter()

    def record_cause(self, failure: Failure, begun: bool) -> Failure:
        """The failure that counts, posted and recorded: another rank's if one was posted before, else this one.

        begun: open the record before, if it is not open. If that fails too (without data it has no name), the first
            failure is still the one that is reported
        """
        peers = self.peers
        if peers is not None:
            # Now, because the launcher may leave this process no time.
            self.attempt.record_end(peers.failure or failure, final=False)
            if failure.doubtful and peers.failure is None and (cause := peers.find_cause()) is not None:
                status = failure.status if failure.status == "timeout" else "error"
                failure = replace(failure, status=status, reason=f"{cause}; {failure.reason}")
            failure = peers.post(failure)
        if begun:
            with suppress(Exception):
                self.attempt.open_record()
        self.attempt.record_end(failure)
        return failure

    def wait_for_readers(self, failure: Failure) -> None:
        """Rank 0 stays until the others know that the reason is recorded, because it may hold the store.
        While the ranks connect it stays longer, for those that still import torch."""
        with self.waiting:
            peers = self.peers
            if self.waited or peers is None:
                return
            self.waited = True
            deadline = time.perf_counter() + (READERS_S if self.connected else REACH_S) + 2 * peers.period_s
            if self.rank == 0:
                peers.tell_recorded()
                while peers.readers() < peers.world_size - 1 and time.perf_counter() < deadline and not peers.lost:
                    time.sleep(peers.period_s / 2)
                return
            while not (peers.recorded or (peers.lost and peers.holder == "rank 0")) and time.perf_counter() < deadline:
                time.sleep(peers.period_s / 2)
            peers.readers(more=1)
            if not peers.recorded:  # record the end in the place of rank 0
                time.sleep(0.2 * min(self.rank, 50))  # the lowest rank first
                folder, status, reason = self.attempt.folder, failure.status, failure.reason
                if folder is not None and end_for_rank_0(folder, status, reason, ended_by=failure.ended_by):
                    tell(f"{status}: {reason}")

    def _supervise(self) -> None:
        """Every PERIOD_S the first of these that holds: a signal; a failure that another rank posted; a rank, the store
        or a stop that is late; a main thread that is late; the time limit; a request to stop that has arrived."""
        while not self.stopped.is_set():
            faulthandler.dump_traceback_later(self.timeout_s + FROZEN_S, exit=True, file=2)
            number = self.signals.wait(PERIOD_S)
            if self.stopped.is_set():
                return
            if number is not None:
                self._signalled(number)
                continue
            peers, silence_s = self.peers, self.timeout_s if self.connected else math.inf
            period_s = peers.period_s if peers else None
            # A failure that another rank posted, unless this main thread will soon have stopped for the same reason.
            if peers and (failure := peers.failure) and not self.stop.main_thread_is_coming(failure):
                # Record it first, then give the main thread time: often its collective fails by itself.
                self.attempt.record_end(failure)
                self.wait_for_readers(failure)
                if not self.stopped.wait(GRACE_S):
                    self._exit(failure)
            elif failure := (peers.lost_contact(silence_s) if peers else None) or self.stop.overdue(period_s):
                self._fail(failure)
            elif time.perf_counter() - self.progress_at > self.within_s:
                self.when_late()
            elif (failure := self.stop.limit_reached()) is not None:
                self._stop_or_fail(failure)
            elif (request := self.stop.received()) is not None:
                self.attempt.record_end(request, final=False)  # now: the launcher may leave this process no time

    def _signalled(self, number: int) -> None:
        """A launcher that ends a job because one rank ended sends the others a signal: then that rank's end counts."""
        reason = f"rank {self.rank} received {signal.Signals(number).name}"
        if self.peers is not None and number == signal.SIGTERM:
            reason += ": from the scheduler, or from the launcher because another rank ended"
        if not self.stop.same_signal():
            ended_by = TIME_LIMIT if number == signal.SIGUSR1 else SIGNAL
            self._stop_or_fail(Failure("killed", reason, 128 + number, self.rank, doubtful=True, ended_by=ended_by))

    def _stop_or_fail(self, failure: Failure) -> None:
        """Let all ranks stop at a boundary. End at once at a second signal and before the first boundary; while the
        ranks connect, as soon as the others can be told."""
        if not self.connected and self.stop.sent is None:
            self.stop.hold(replace(failure, doubtful=False))
            return
        if not self.stop.can_send():
            self._fail(failure)
        self.attempt.record_end(failure, final=False)
        self.stop.send(failure, partial(self.peers.first, STOP) if self.peers else None)

    def _fail(self, failure: Failure, begun: bool = False) -> None:
        try:
            first = self.record_cause(failure, begun)
            if first.rank == self.rank:
                tell(f"{first.status}: {first.reason}")
            self.wait_for_readers(first)
            self._exit(first)
        finally:  # no failure may leave a process that only SIGKILL ends
            os._exit(failure.exit_code)

    def _exit(self, failure: Failure) -> None:
        if failure.status == "timeout":  # the log shows where each rank waits
            print_stacks()
        mine = failure.rank == self.rank or failure.status == Stopped.status
        os._exit(failure.exit_code if mine else PeerFailed.exit_code)


def print_stacks() -> None:
    """Print the stacks of this rank's threads and of its loader workers. For a process that is about to end: other
    child processes end by the signal."""
    faulthandler.dump_traceback(2)
    workers = multiprocessing.active_children()
    for worker in workers:
        if worker.pid is not None:
            os.write(2, f"{worker.name}, pid {worker.pid}:\n".encode())
            with suppress(ProcessLookupError):
                os.kill(worker.pid, SHOW)
            time.sleep(PRINTING_S / len(workers))
