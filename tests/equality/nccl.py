"""NCCL's rules, applied to recorded traces (tests/support/trace.py): does every rank reach the end of its trace?

- A communicator is made at its first use, and that stops the host until the host of every member is there.
- An operation begins after everything that the rank's stream had to wait for before its launch.
- Operations of one communicator run one after the other, in the order of their launch. A collective runs when every
  member's next operation is that collective; a send meets its receive; a batch ends when all its messages have.
- A GPU has few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), and streams beyond them share one: then
  operations of different communicators run one after the other too. `one_queue` is the strictest case: one for a rank.
- `synchronize` stops the host until all that it launched has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.support.trace import Event

Members: TypeAlias = Mapping[str, tuple[int, ...]]  # global ranks of each communicator


@dataclass
class Rank:
    """host: index of the next event; stream: launched, and waits, not yet begun; running: in one queue, or one each."""

    events: Sequence[Event]
    members: Members
    one_queue: bool = False
    host: int = 0
    stream: deque[Event] = field(default_factory=deque[Event])
    running: dict[str, deque[Event]] = field(default_factory=dict[str, deque[Event]])
    ended: set[int] = field(default_factory=set[int])

    @property
    def next(self) -> Event | None:
        return self.events[self.host] if self.host < len(self.events) else None

    @property
    def idle(self) -> bool:
        return not self.stream and not any(self.running.values())

    def queue(self, communicator: str) -> deque[Event]:
        return self.running.setdefault("" if self.one_queue else communicator, deque())

    def first(self, communicator: str) -> Event | None:
        """The communicator's operation that is next in its queue."""
        queue = self.queue(communicator)
        return queue[0] if queue and queue[0][1] == communicator else None

    def end(self, communicator: str) -> None:
        self.ended.add(self.queue(communicator).popleft()[2])

    def flow(self) -> bool:
        """Give operations that need not wait any longer to their communicator. True if there was one."""
        before = len(self.stream)
        while self.stream and (self.stream[0][0] != "wait" or self.stream[0][1] in self.ended):
            event = self.stream.popleft()
            if event[0] != "wait":
                self.queue(event[1]).append(event)
        return len(self.stream) < before


class Replay:
    """made: communicators that exist from the start."""

    def __init__(
        self,
        traces: Sequence[Sequence[Event]],
        members: Sequence[Members],
        made: Sequence[str] = (),
        one_queue: bool = False,
    ) -> None:
        self.ranks = [Rank(_own_messages(events), own, one_queue) for events, own in zip(traces, members, strict=True)]
        self.made = set(made)
        self.arrived: dict[str, set[int]] = {}

    def stuck(self) -> dict[int, str]:
        """For each rank that does not reach its end, the event at which it waits; empty: all reach it."""
        while self._meet() | any(self._move(rank) for rank in range(len(self.ranks))):
            pass
        return {
            number: f"host at event {rank.host}: {rank.next}; device: {_where(rank)}"
            for number, rank in enumerate(self.ranks)
            if rank.next is not None or not rank.idle
        }

    def _meet(self) -> bool:
        together = all(rank.next == ("meet",) for rank in self.ranks)
        for rank in self.ranks:
            rank.host += together
        return together

    def _move(self, number: int) -> bool:
        rank, before = self.ranks[number], self.ranks[number].host
        while (event := rank.next) is not None and self._passes(number, event):
            rank.host += 1
        moved = rank.flow()
        next_ones = [queue[0][1] for queue in rank.running.values() if queue]
        return any(self._run(number, communicator) for communicator in next_ones) or moved or rank.host > before

    def _passes(self, number: int, event: Event) -> bool:
        """Whether this rank's host gets past the event."""
        rank = self.ranks[number]
        if event[0] == "meet":
            return False
        if event[0] == "synchronize":
            return rank.idle
        if event[0] in ("collective", "messages") and not self._exists(number, event[1]):
            return False
        if event[0] != "ready":
            rank.stream.append(event)
        return True

    def _exists(self, number: int, communicator: str) -> bool:
        arrived = self.arrived.setdefault(communicator, set())
        arrived.add(number)
        if arrived >= set(self.ranks[number].members[communicator]):
            self.made.add(communicator)
        return communicator in self.made

    def _run(self, number: int, communicator: str) -> bool:
        first = self.ranks[number].first(communicator)
        if first is None:
            return False
        run = self._run_collective if first[0] == "collective" else self._run_messages
        return run(number, communicator, first)

    def _run_collective(self, number: int, communicator: str, first: Event) -> bool:
        members = [self.ranks[member] for member in self.ranks[number].members[communicator]]
        operations = [member.first(communicator) for member in members]
        if any(operation is None or operation[0] != "collective" for operation in operations):
            return False
        assert {operation[3] for operation in operations if operation} == {first[3]}, operations
        for member in members:
            member.end(communicator)
        return True

    def _run_messages(self, number: int, communicator: str, first: Event) -> bool:
        moved = False
        for kind, peer in list(first[3]):
            there = self.ranks[peer].first(communicator)
            answer = ("recv" if kind == "send" else "send", number)
            if there is not None and there[0] == "messages" and answer in there[3]:
                first[3].remove((kind, peer))
                there[3].remove(answer)
                moved = True
                if not there[3]:
                    self.ranks[peer].end(communicator)
        if not first[3]:
            self.ranks[number].end(communicator)
        return moved


def _own_messages(events: Sequence[Event]) -> list[Event]:
    """Copies of the lists, which are used up."""
    return [(*event[:3], list(event[3])) if event[0] == "messages" else event for event in events]


def _where(rank: Rank) -> str:
    running = [str(queue[0]) for queue in rank.running.values() if queue]
    waits = [f"waits for {rank.stream[0][1]}"] if rank.stream else []
    return ", ".join(running + waits) or "idle"
