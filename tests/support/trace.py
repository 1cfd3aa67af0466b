"""What a rank's collectives, waits and host synchronizations over gloo would be on a GPU over NCCL, in order.

Recorded where Python enters a process group, so what C++ starts by itself (DDP's reducer, functional collectives) is
not in it. The harness's own numbers are sent over gloo on a GPU too: there every host waits for all others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddlbench.measure import clock

# ("collective", communicator, number, operation), ("messages", communicator, number, [("send" | "recv", peer), ...]),
# ("wait", number), ("synchronize",), ("meet",), ("ready",): the set-up has ended
Event: TypeAlias = tuple[Any, ...]

COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "alltoall", "alltoall_base", "gather", "scatter",
    "barrier",
)  # fmt: skip
HARNESS = "ddlbench/measure/", "ddlbench/ranks/boundary.py"
CONTROL = ("ddlbench/ranks/control.py",)
NUMBERS = "numbers of all ranks, over gloo"  # a communicator from the start: what a framework sends through CONTROL
MARKS_ONLY = "ddlbench/measure/profiling/spans.py"  # calls the framework's own functions


class Trace:
    """Records while it is entered.

    members: of each communicator, the global ranks. Where the clock asks for an idle device, the collectives of this
    rank must end without its host's further work, within `timeout_s`; None: that is not looked at.
    """

    def __init__(self, timeout_s: float | None = 30.0) -> None:
        self.timeout_s = timeout_s
        self.events: list[Event] = []
        self.members: dict[str, tuple[int, ...]] = {}
        self.works: dict[int, tuple[dist.Work, int]] = {}  # by id: kept, so that no other work gets the same id
        self.open: dict[int, str] = {}  # collectives without a wait so far, by id of their work
        self.batch: list[Event] | None = None
        self.count = 0
        self.unused: list[Any] = []

    def __enter__(self) -> Trace:
        self.patches = ExitStack()
        group: Any = dist.ProcessGroup
        for name in COLLECTIVES:
            if hasattr(group, name):  # torch 2.14 renamed some
                self._replace(group, name, self._collective(name, getattr(group, name)))
        for name in ("send", "recv"):
            self._replace(group, name, self._message(name, getattr(group, name)))
        self._replace(dist.Work, "wait", self._wait(dist.Work.wait))
        self._replace(dist, "batch_isend_irecv", self._batched(dist.batch_isend_irecv))
        self._replace(clock, "idle", self._idle(clock.idle))
        return self

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self.patches.enter_context(patch.object(owner, name, function))

    def __exit__(self, *_: object) -> None:
        self.patches.close()
        self.works.clear()
        self.open.clear()

    def set_up(self) -> None:
        """The set-up has ended: every communicator should have been used."""
        self.events.append(("ready",))
        self.unused = [group for group in dist.distributed_c10d._world.pg_map if not _operations(group)]

    def first_uses(self) -> list[str]:
        """Communicators that were used only after the set-up. Operations that C++ started count too."""
        ready = self.events.index(("ready",))
        used = [
            {event[1] for event in part if event[0] in ("collective", "messages")}
            for part in (self.events[:ready], self.events[ready:])
        ]
        late = {self._communicator(group) for group in self.unused if _operations(group)}
        return sorted((used[1] - used[0] - {NUMBERS}) | late)

    def step_ended(self) -> None:
        """Any step may be the last of the warm-up: then the device is idle and all ranks wait for each other."""
        self.events += [("synchronize",), ("meet",)]

    def _communicator(self, group: Any, *pair: int) -> str:
        ranks = sorted(pair) or dist.get_process_group_ranks(group)
        name = NUMBERS if _called_from(CONTROL) else f"{group.group_name}:{ranks}"
        self.members[name] = tuple(ranks)
        return name

    def _number(self) -> int:
        self.count += 1
        return self.count

    def _collective(self, name: str, real: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def recorded(group: Any, *args: Any, **kwargs: Any) -> dist.Work:
            if _called_from(HARNESS):
                self.events.append(("meet",))
                return real(group, *args, **kwargs)
            number = self._number()
            self.events.append(("collective", self._communicator(group), number, name))
            work = real(group, *args, **kwargs)
            self.works[id(work)] = work, number
            self.open[id(work)] = name
            return work

        return recorded

    def _message(self, kind: str, real: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        """torch's NCCL group sends batches in its own communicator, single messages in one of two ranks."""

        def recorded(group: Any, tensors: Any, peer: int, tag: int) -> dist.Work:
            there = dist.get_global_rank(group, peer)
            if self.batch is None:
                number = self._number()
                self.events.append(
                    ("messages", self._communicator(group, dist.get_rank(), there), number, [(kind, there)])
                )
            else:
                number = self.batch[0][2] if self.batch else self._number()
                self.batch.append(("messages", self._communicator(group), number, (kind, there)))
            work = real(group, tensors, peer, tag)
            self.works[id(work)] = work, number
            return work

        return recorded

    def _batched(self, real: Callable[..., list[dist.Work]]) -> Callable[..., list[dist.Work]]:
        def recorded(operations: list[dist.P2POp]) -> list[dist.Work]:
            self.batch = []
            works = real(operations)
            (communicator,) = {event[1] for event in self.batch}
            self.events.append(("messages", communicator, self.batch[0][2], [event[3] for event in self.batch]))
            self.batch = None
            return works

        return recorded

    def _wait(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def recorded(work: dist.Work, *args: Any) -> bool:
            if id(work) in self.works:
                self.events.append(("wait", self.works[id(work)][1]))
                self.open.pop(id(work), None)
            return real(work, *args)

        return recorded

    def _idle(self, real: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
        def recorded(device: torch.device) -> None:
            self.events.append(("synchronize",))
            self._assert_all_ended()
            real(device)

        return recorded

    def _assert_all_ended(self) -> None:
        if self.timeout_s is None:
            return
        deadline = time.monotonic() + self.timeout_s
        for key, name in self.open.items():
            while not self.works[key][0].is_completed():
                assert time.monotonic() < deadline, f"{name} is in flight: it waits for later work of this rank's host"
                time.sleep(0.001)


def _operations(group: Any) -> int:
    return group._get_sequence_number_for_group()


def _called_from(files: tuple[str, ...]) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in files) and not name.endswith(MARKS_ONLY):
            return True
        frame = frame.f_back
    return False
