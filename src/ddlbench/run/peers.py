"""What ranks exchange through the rendezvous store, without collectives: heartbeats, the first failure.

A thread makes all requests to the store: a request to a store whose process is stopped never returns, and the thread
that needs the answer must not wait for it.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from ddlbench.errors import Failure, PeerFailed
from ddlbench.ranks.boundary import StopRequest
from ddlbench.texts import first_few

T = TypeVar("T")

FAILURE, RECORDED, READERS, BEAT = (f"ddlbench/{name}" for name in ("failure", "recorded", "readers", "beat"))
STOP, STOP_AT = "ddlbench/stop", "ddlbench/stop_at"
ANSWER_S = 3.0  # longest wait for one answer of the store
SILENCE_S = 4.0  # without a heartbeat, after which a rank is named as the cause of a failure
REPORT_S = 2.0  # longer than silence_s a rank waits for the cause that another rank finds


class Peers:
    """The store's keys as attributes, which a thread renews every `period_s`; in larger worlds this time is longer.

    store: a connection of its own, so that a thread may read it while another waits in the store
    failure: the first that was posted; recorded: whether rank 0 has written it
    lost: the store's process has ended
    stop: this rank's, which gets what the ranks agree on
    """

    def __init__(self, store: Any, rank: int, world_size: int, stop: StopRequest | None = None) -> None:
        self.store, self.rank, self.world_size, self.stop = store, rank, world_size, stop or StopRequest(rank)
        self.announced = False
        self.period_s = max(0.25, world_size / 500)
        self.silence_s = max(SILENCE_S, 3 * self.period_s)
        self.report_s = max(REPORT_S, 2 * self.period_s)  # one to find the cause, one to read it
        self.holder = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        self.failure: Failure | None = None
        self.recorded = self.lost = self.closed = False
        self.next_rank = (rank + 1) % world_size  # the one this rank listens to all the time
        self.next_beat = b""
        self.next_changed = time.perf_counter()
        self.beats = 0
        self.asked_at: float | None = None  # since when a request to the store is under way
        self.requests: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="ddlbench-peers", daemon=True)
        self.thread.start()

    def post(self, failure: Failure) -> Failure:
        """The failure that was posted first: this one or another rank's."""
        return self.first(FAILURE, failure) or self.failure or failure  # which this rank may have read before

    def first(self, key: str, failure: Failure) -> Failure | None:
        """The first failure that a rank set under this key, else this one. None: the store does not answer."""
        text = json.dumps(asdict(failure))
        first = self._ask(lambda store: store.compare_set(key, "", text))
        return Failure(**json.loads(first)) if first else None

    def tell_recorded(self) -> None:
        """Rank 0 has written the end: the others need not do it."""
        self._ask(lambda store: store.set(RECORDED, ""))

    def readers(self, more: int = 0) -> int:
        """How many ranks know that the end is recorded, after `more` of them: the store's process need not stay for
        these."""
        return self._ask(lambda store: store.add(READERS, more)) or 0

    def lost_contact(self, timeout_s: float) -> Failure | None:
        """The store's process has ended, or the next rank has sent no heartbeat for `timeout_s`."""
        if self.lost:
            reason = f"rank {self.rank} lost its connection to the rendezvous store"
            return Failure("error", reason, PeerFailed.exit_code, self.rank, doubtful=True)
        if (seconds := time.perf_counter() - self.next_changed) <= timeout_s:
            return None
        reason = f"rank {self.rank} has not heard from {self.name(self.next_rank)} for {seconds:.0f} s"
        return Failure.with_status("timeout", f"{reason} (train.timeout_s)", self.rank, doubtful=True)

    def name(self, rank: int) -> str:
        """rank 3 (node7, pid 4711), as its heartbeat says."""
        beat = (self._beats([rank]) or {}).get(rank, "")
        _, _, place = beat.partition(" ")
        return f"rank {rank} ({place})" if place else f"rank {rank}"

    def find_cause(self) -> str | None:
        """Which ranks ended without a message or are stopped, in words; None if every rank sends heartbeats, or if a
        failure was posted meanwhile.

        All ranks of a run that hangs call this at the same time, and one store answers them: rank 0 looks at every
        rank, another rank at its next one. It then waits for what rank 0 or the neighbour of the lost rank posts, and
        looks at every rank only if neither posts anything. Takes up to silence_s on rank 0, and up to
        2 silence_s + report_s on the other ranks.
        """
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        if self.rank == 0 or self.world_size == 2:
            return self._look(others)
        reported_by = time.perf_counter() + self.silence_s + self.report_s
        if (cause := self._look([self.next_rank])) is not None:
            return cause
        while self.failure is None and time.perf_counter() < reported_by:
            time.sleep(self.period_s / 2)
        return self._look(others) if self.failure is None else None

    def _look(self, ranks: Sequence[int]) -> str | None:
        """Which of these ranks send no heartbeat, in the words of `find_cause`."""
        before = now = self._beats(ranks)
        deadline = time.perf_counter() + self.silence_s
        while before is not None and now is not None and ranks and time.perf_counter() < deadline:
            time.sleep(self.period_s)
            if self.failure is not None:
                return None
            now = self._beats(ranks)
            ranks = [rank for rank in ranks if now is not None and now.get(rank) == before.get(rank)]
        if before is None or now is None:
            if self.lost:
                return f"{self.holder}, which held the rendezvous store, ended without a message"
            return (
                f"{self.holder}, which holds the rendezvous store, does not answer: it is stopped or cannot be reached"
            )
        if not ranks:
            return None
        named = ", ".join(first_few(ranks, 3, text=self.name))
        return f"{named} ended without a message, or is stopped: see its output and the system log of its node"

    def _beats(self, ranks: Sequence[int]) -> dict[int, str] | None:
        """The last heartbeat of each rank that has sent one; None if the store does not answer."""
        keys = {rank: f"{BEAT}/{rank}" for rank in ranks}

        def read(store: Any) -> dict[int, str]:
            sent = keys if store.check(list(keys.values())) else {r: k for r, k in keys.items() if store.check([k])}
            values = store.multi_get(list(sent.values())) if sent else []
            return {rank: value.decode() for rank, value in zip(sent, values, strict=True)}

        return self._ask(read)

    def _ask(self, request: Callable[[Any], T]) -> T | None:
        """The store's answer; None if it does not give one within ANSWER_S."""
        stuck = self.asked_at is not None and time.perf_counter() - self.asked_at > ANSWER_S
        if self.lost or stuck or not self.thread.is_alive():
            return None
        answer: Future[T] = Future()
        self.requests.put((request, answer))
        try:
            return answer.result(ANSWER_S)
        except (RuntimeError, TimeoutError):
            return None

    def close(self) -> None:
        """End the exchange. A thread within the store would disturb the interpreter's end."""
        self.closed = True
        self.thread.join(ANSWER_S)

    def _serve(self) -> None:
        while not (self.lost or self.closed):
            try:
                request, answer = self.requests.get(timeout=self.period_s)
            except queue.Empty:
                request, answer = None, None
            self.asked_at = time.perf_counter()
            try:
                if request is not None and answer is not None:
                    answer.set_result(request(self.store))
                if not self.recorded:  # else the store's process may end, and torch prints a stack for each request
                    self._round()
            except RuntimeError as error:
                self.lost = True
                if answer is not None and not answer.done():
                    answer.set_exception(error)
            self.asked_at = None

    def _round(self) -> None:
        """Send a heartbeat; read what other ranks have posted; agree on where to stop."""
        self.beats += 1
        self.store.set(f"{BEAT}/{self.rank}", f"{self.beats} {socket.gethostname()}, pid {os.getpid()}")
        if self.failure is None and self.store.check([FAILURE]):
            self.failure = Failure(**json.loads(self.store.get(FAILURE)))
        elif self.failure is not None and not self.recorded:
            self.recorded = self.store.check([RECORDED])
        key = f"{BEAT}/{self.next_rank}"
        beat = self.store.get(key) if self.store.check([key]) else b""
        if beat != self.next_beat:
            self.next_beat, self.next_changed = beat, time.perf_counter()
        if self.stop.at is not None or not (self.announced or self.store.check([STOP])):
            return
        if not self.announced:
            passed = self.stop.announce(Failure(**json.loads(self.store.get(STOP))))
            self.store.set(f"{STOP_AT}/{self.rank}", str(passed))
            self.announced = True
        keys = [f"{STOP_AT}/{rank}" for rank in range(self.world_size)]
        if self.rank == 0 and self.store.check(keys):  # all have announced
            self.store.set(STOP_AT, str(max(map(int, self.store.multi_get(keys))) + 1))
        if self.store.check([STOP_AT]):
            self.stop.decide(int(self.store.get(STOP_AT)))
