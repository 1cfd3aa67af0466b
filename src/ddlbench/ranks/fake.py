"""One rank of a world that does not exist: torch's fake process group and fake tensors, on a machine without devices.

A collective returns at once and sends nothing; a tensor has a shape, a type and a device, and no memory. So a framework
can be set up as any rank of any number of ranks, on "cuda" too where there is no GPU. What torch asks of a real device
meanwhile is answered here, what other libraries ask beside their adapters (`fake_answers`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from ddlbench.ranks import fake_reducer

Answer = tuple[Any, str, Any]  # module or object, name of its attribute, value meanwhile


@runtime_checkable
class AsksMore(Protocol):
    """A framework whose library asks more than torch does, of its peers or of the driver."""

    def fake_answers(self, rank: int, world_size: int, device: torch.device) -> Sequence[Answer]: ...


@contextmanager
def fake_world(rank: int, world_size: int, device: torch.device, framework: object = None) -> Generator[None]:
    """Within it this process is `rank` of `world_size` ranks, and tensors are fake. No process group may exist yet.
    framework: the one that is set up, for what its library asks"""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch.testing._internal.distributed.fake_pg import FakeStore

    get_torch_obj_rule_map()  # made once, of torch's functions as they are at that moment
    asked = framework.fake_answers(rank, world_size, device) if isinstance(framework, AsksMore) else ()

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with ExitStack() as stack:
            for target, name, value in (*ANSWERS, *(CUDA_ANSWERS if device.type == "cuda" else ()), *asked):
                stack.enter_context(patch.object(target, name, value))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield
    finally:
        dist.destroy_process_group()


def _swap(one: Tensor, other: Tensor) -> None:
    """torch.utils.swap_tensors, which `Module.to` uses for fake parameters, refuses tensors that something refers to
    weakly: the fake mode does so with every tensor."""
    attributes = vars(one).copy(), vars(other).copy()
    for tensor, own in zip((other, one), attributes, strict=True):
        vars(tensor).clear()
        vars(tensor).update(own)
    one.__class__, other.__class__ = other.__class__, one.__class__
    torch._C._swap_tensor_impl(one, other)  # pyright: ignore


def _with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mesh counts its ranks with tensors of integers, whose values it reads."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


waits: list[Callable[[str], None]] = []  # called with each call in which the host would wait for its device


def _waiting(name: str) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        for note in waits:
            note(name)

    return call


def returning(value: Any) -> Callable[..., Any]:
    """A function that returns it, whatever it is given."""
    return lambda *_, **__: value


class _Event:
    """A CUDA event that nobody records: no work takes time."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    synchronize = _waiting("Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Stream:
    """A CUDA stream in which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    synchronize = _waiting("Stream.synchronize")

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


STREAM = _Stream()
ANSWERS: tuple[Answer, ...] = (
    (torch.utils, "swap_tensors", _swap),
    (DeviceMesh, "__init__", _with_real_tensors(DeviceMesh.__init__)),
    *fake_reducer.ANSWERS,
)
CUDA_ANSWERS: tuple[Answer, ...] = (
    (torch.cuda, "Event", _Event),
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "stream", returning(nullcontext())),
    *((torch.cuda, name, returning(STREAM)) for name in ("current_stream", "default_stream")),
    (torch.cuda, "synchronize", _waiting("synchronize")),
    *((torch.cuda, name, returning(None)) for name in ("set_device", "_lazy_init", "get_rng_state", "set_rng_state")),
    (torch.cuda, "current_device", returning(0)),
    (torch.cuda, "is_bf16_supported", returning(True)),
    (torch.cuda.amp.common, "amp_definitely_not_available", returning(False)),
    (torch.cuda, "get_device_properties", returning(SimpleNamespace(major=9, minor=0, multi_processor_count=132))),
    (Tensor, "record_stream", returning(None)),
)
