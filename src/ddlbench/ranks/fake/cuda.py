"""torch.cuda without a driver (fake.py): streams and events that take no time, and a GPU's properties.

The functions in `waits` are called when the host would wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ddlbench.ranks.fake.answers import Answer, returning

waits: list[Callable[[str], None]] = []  # called with each call in which the host would wait for its device
MEMORY = sys.maxsize  # bytes, free and in all: what fits is not asked here


def _waiting(name: str) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        for note in waits:
            note(name)

    return call


class Event:
    """A CUDA event: no work takes time."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    synchronize = _waiting("Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    """A CUDA stream in which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    synchronize = _waiting("Stream.synchronize")

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


COMPUTE = Stream()
_current = [COMPUTE]


def current_stream(*_: Any, **__: Any) -> Stream:
    return _current[-1]


@contextmanager
def stream(entered: Stream | None) -> Generator[None]:
    """None: the current one, as torch has it."""
    _current.append(entered or _current[-1])
    try:
        yield
    finally:
        _current.pop()


PROPERTIES = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=MEMORY)  # those of an H100
ANSWERS: tuple[Answer, ...] = (
    (torch.cuda, "Event", Event),
    (torch.cuda, "Stream", Stream),
    (torch.cuda, "stream", stream),
    *((module, "current_stream", current_stream) for module in (torch.cuda, torch.accelerator)),
    (torch.cuda, "default_stream", returning(COMPUTE)),
    (torch.cuda, "synchronize", _waiting("synchronize")),
    *((torch.cuda, name, returning(None)) for name in ("set_device", "_lazy_init", "get_rng_state", "set_rng_state")),
    *((torch.cuda, name, returning(None)) for name in ("empty_cache", "reset_peak_memory_stats")),
    *((torch.cuda, name, returning(0)) for name in ("current_device", "_exchange_device", "_maybe_exchange_device")),
    *((torch.cuda, name, returning(0)) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")),
    (torch.cuda, "memory_stats", returning({})),
    (torch.cuda, "mem_get_info", returning((MEMORY, MEMORY))),
    (torch.cuda, "is_bf16_supported", returning(True)),
    (torch.cuda, "is_current_stream_capturing", returning(False)),
    (torch.cuda.amp.common, "amp_definitely_not_available", returning(False)),
    (torch.cuda, "get_device_properties", returning(PROPERTIES)),
    (torch.cuda, "get_device_capability", returning((PROPERTIES.major, PROPERTIES.minor))),
    (Tensor, "record_stream", returning(None)),
)
