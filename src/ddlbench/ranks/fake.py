"""One rank of a world that does not exist: torch's fake process group and fake tensors, on a machine without devices.

A collective returns at once and sends nothing; a tensor has a shape, a type and a device, and no memory. So a framework
can be set up as any rank of any number of ranks, on "cuda" too where there is no GPU. What torch and its libraries ask
of a real device meanwhile is answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def fake_world(rank: int, world_size: int, device: torch.device) -> Generator[None]:
    """Within it this process is `rank` of `world_size` ranks, and tensors are fake. No process group may exist yet."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch.testing._internal.distributed.fake_pg import FakeStore

    get_torch_obj_rule_map()  # made once, of torch's functions as they are at that moment

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with ExitStack() as stack:
            for target, name, value in (*ANSWERS, *(CUDA_ANSWERS if device.type == "cuda" else ())):
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


class _Event:
    """A CUDA event that nobody records: no work takes time."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


ANSWERS: tuple[tuple[Any, str, Any], ...] = (
    (torch.utils, "swap_tensors", _swap),
    (DeviceMesh, "__init__", _with_real_tensors(DeviceMesh.__init__)),
)
CUDA_ANSWERS: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "Event", _Event),
    *((torch.cuda, name, _returning(None)) for name in ("synchronize", "set_device", "_lazy_init")),
    (torch.cuda, "current_device", _returning(0)),
    (torch.cuda, "get_device_properties", _returning(SimpleNamespace(major=9, minor=0, multi_processor_count=132))),
)
