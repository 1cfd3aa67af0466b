"""Races between the streams of a GPU, seen without one: a rehearsal whose operations have their place in a stream.

The fake GPU (src/ddlbench/ranks/fake/cuda.py) says which stream is current, and which one waits for which. The
operations of a stream are numbered, and every stream has a clock: for each other stream the number up to which it has
waited (a vector clock). Two uses of a storage, one of them a write, must be ordered by the clocks. The allocator gives
memory that was freed to the stream that has allocated it: this stream must have waited for all other uses, or
`record_stream` must have named the streams of these.

Collectives count as operations of the current stream; streams that NCCL has for itself do not exist here.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from ddlbench.ranks.fake import cuda as fake_cuda
from ddlbench.ranks.fake.storages import identity, tensors
from ddlbench.ranks.launchers import Launch
from ddlbench.rehearsal import rehearse
from ddlbench.rehearsal.observed import Observed
from tests.support.rehearsals import config

WORLD = 8
OUTSIDE = ("/torch/", "/ddlbench/ranks/fake/", "/ddlbench/rehearsal/", "/tests/support/", "contextlib.py")


class Use(NamedTuple):
    """An operation: its stream, its number there, and the lines that asked for it."""

    stream: int
    number: int
    place: str


@dataclass
class Memory:
    """A storage. owner: the stream that allocated it; written: its last write; used: the last use by each stream."""

    owner: int
    written: Use
    used: dict[int, Use] = field(default_factory=dict[int, Use])
    recorded: set[int] = field(default_factory=set[int])


class Streams:
    """found: what is not ordered, and how often"""

    def __init__(self) -> None:
        self.clocks, self.host = dict[int, Counter[int]](), Counter[int]()
        self.memory = dict[int, Memory]()
        self.reusable = dict[int, list[Use]]()  # by owner: uses of memory that it may give out again
        self.found = Counter[str]()
        self.known = dict[int, Any]()  # keeps the streams, so that no two have the same identity

    def clock(self, stream: Any) -> Counter[int]:
        self.known[id(stream)] = stream
        return self.clocks.setdefault(id(stream), Counter(self.host))

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation, after it was called."""
        if func.is_view:
            return
        stream = fake_cuda.current_stream()
        clock = self.clock(stream)
        clock[id(stream)] += 1
        use = Use(id(stream), clock[id(stream)], where())
        given = {identity(tensor) for tensor in tensors((args, kwargs))}
        written = {identity(tensor) for tensor in written_by(func, args, kwargs)}
        for tensor in tensors((args, kwargs, out)):
            if tensor.device.type == "cuda":
                key = identity(tensor)
                self._used(tensor, use, writes=key in written or key not in given)

    def _used(self, tensor: Tensor, use: Use, writes: bool) -> None:
        key = identity(tensor)
        if key not in self.memory:
            self.memory[key] = Memory(use.stream, use)
            for earlier in self.reusable.pop(use.stream, ()):
                if not self._ordered(earlier, use.stream):
                    self.found[f"{earlier.place} may read memory that was freed"] += 1
            weakref.finalize(tensor.untyped_storage(), self.freed, key)
        memory = self.memory[key]
        for earlier in (memory.written, *(memory.used.values() if writes else ())):
            if not self._ordered(earlier, use.stream):
                self.found[f"{use.place} does not wait for {earlier.place}"] += 1
        memory.used[use.stream] = use
        if writes:
            memory.written = use

    def freed(self, key: int) -> None:
        if memory := self.memory.pop(key, None):
            waited = [use for use in memory.used.values() if use.stream not in memory.recorded]
            self.reusable.setdefault(memory.owner, []).extend(waited)

    def _ordered(self, earlier: Use, stream: int) -> bool:
        return earlier.stream == stream or self.clocks[stream][earlier.stream] >= earlier.number

    def all_wait(self, clock: Counter[int]) -> None:
        """The host has waited: whatever it starts from now on comes later."""
        for other in (self.host, *self.clocks.values()):
            other |= clock

    @contextmanager
    def watching(self) -> Generator[None]:
        """Around a rehearsal: streams and events of the fake GPU set the clocks. Memory that is freed after the steps
        does not count."""

        def wait_stream(stream: Any, other: Any) -> None:
            mine = self.clock(stream)
            mine |= self.clock(other)

        def record(event: Any, stream: Any = None) -> None:
            event.clock = Counter(self.clock(stream or fake_cuda.current_stream()))

        def recorded(event: Any) -> Counter[int]:
            clock: Any = getattr(event, "clock", None)
            return clock or Counter()

        def wait(event: Any, stream: Any = None) -> None:
            mine = self.clock(stream or fake_cuda.current_stream())
            mine |= recorded(event)

        def synchronize(*_: object, **__: object) -> None:
            total = Counter[int]()
            for clock in self.clocks.values():
                total |= clock
            self.all_wait(total)

        def record_stream(tensor: Tensor, stream: Any) -> None:
            self.clock(stream)
            if identity(tensor) in self.memory:
                self.memory[identity(tensor)].recorded.add(id(stream))

        def stepped(*args: Any, **kwargs: Any) -> Any:
            row = steps(*args, **kwargs)
            self.memory.clear()
            return row

        streams, steps = self, rehearse.stepped

        class Watched(Observed):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = super().__torch_dispatch__(func, types, args, kwargs)
                if out is not NotImplemented:
                    streams.note(func, args, kwargs or {}, out)
                return out

        answers = ((torch.cuda, "synchronize", synchronize), (Tensor, "record_stream", record_stream))
        with ExitStack() as stack:
            enter = partial(patch.object, fake_cuda.Stream), partial(patch.object, fake_cuda.Event)
            stack.enter_context(enter[0]("wait_stream", wait_stream))
            stack.enter_context(enter[0]("synchronize", lambda one: self.all_wait(Counter(self.clock(one)))))
            stack.enter_context(enter[1]("record", record))
            stack.enter_context(enter[1]("wait", wait))
            stack.enter_context(enter[1]("synchronize", lambda one: self.all_wait(recorded(one))))
            stack.enter_context(patch.object(fake_cuda, "ANSWERS", (*fake_cuda.ANSWERS, *answers)))
            stack.enter_context(patch.object(rehearse, "Observed", Watched))
            stack.enter_context(patch.object(rehearse, "stepped", stepped))
            yield


def races(framework: str, model: str, *words: str, rank: int = 0) -> tuple[Counter[str], int]:
    """What is not ordered in a rehearsal of one of 8 ranks on a fake GPU, and the number of streams."""
    streams = Streams()
    launch = Launch("torchrun", rank, WORLD, rank, WORLD)
    with streams.watching():
        row = rehearse.rehearse(config(framework, model, *words), launch, torch.device("cuda", 0))
    assert row.error is None, row.error
    return streams.found, len(streams.known)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes."""
    values = [*zip(func._schema.arguments, args, strict=False)]
    values += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    changed = [value for argument, value in values if argument.alias_info is not None and argument.alias_info.is_write]
    return list(tensors(changed))


def where() -> str:
    """The two innermost lines outside of torch and of the rehearsal."""
    frame, lines = inspect.currentframe(), list[str]()
    while frame is not None and len(lines) < 2:
        file = frame.f_code.co_filename
        if not any(part in file for part in OUTSIDE):
            lines.append(f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)
