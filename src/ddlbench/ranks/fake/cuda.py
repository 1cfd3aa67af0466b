"""A GPU that does not exist, for Python: torch.cuda without a driver (streams and events that take no time, and a GPU's
properties), and fake tensors that are on "cuda" for Python and on "meta" for torch's C++ code (docs/adr/0018).

Autograd is written in C++. It asks each tensor for its device, and the driver of that device for its stream, which does
not exist on a machine without a GPU. For "meta" it needs no stream and runs the backward pass in the calling thread, so
C++ sees "meta" here. One mode translates the devices that Python names, another one those that C++ names. Choices that
C++ makes by the device, and makes differently for "meta", are in ranks/fake/kernels.py.

torch leaves a function mode while it runs one of its functions, and a backward pass is one. Here the modes are entered
again for it, so that they also see hooks and recomputed blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ddlbench.errors import RunError
from ddlbench.ranks.fake.kernels import cuda_kernels

waits: list[Callable[[str], None]] = []  # called with each call in which the host would wait for its device
MEMORY = sys.maxsize  # bytes, free and in all: what fits is not asked here
META = torch.device("meta")
BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
SEEN = ("dispatch_device", "device_for_backend_keys")  # what C++ finds: Python's answer; the kernels of which device

Answer = tuple[Any, str, Any]  # module or object, name of its attribute, value in the fake world
_left: list[TorchFunctionMode] = []  # by a backward pass, innermost first


def returning(value: Any) -> Callable[..., Any]:
    """A function that returns `value` for any arguments."""
    return lambda *_, **__: value


def leave(mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of BACKWARD in the `__torch_function__` of a mode."""
    _left.append(mode)
    try:
        return func(*args, **kwargs)
    finally:
        if mode in _left:
            _left.remove(mode)


@contextmanager
def _entered_again() -> Generator[None]:
    with ExitStack() as stack:
        while _left:
            stack.enter_context(_left.pop())
        yield


RUN_BACKWARD = _entered_again()(torch.autograd.graph._engine_run_backward)  # pyright: ignore


def _wait(name: str, *_: Any, **__: Any) -> None:
    for note in waits:
        note(name)


class Event:
    """A CUDA event: no work takes time."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = returning(None)
    query, elapsed_time = returning(True), returning(0.0)
    synchronize = staticmethod(partial(_wait, "Event.synchronize"))


class Stream:
    """A CUDA stream in which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    wait_stream, query = returning(None), returning(True)
    synchronize = staticmethod(partial(_wait, "Stream.synchronize"))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

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
    (torch.cuda, "synchronize", partial(_wait, "synchronize")),
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


@contextmanager
def fake_device(device: torch.device) -> Generator[None]:
    """A FakeTensorMode for a device of type "cuda", and the answers of its driver."""
    with ExitStack() as stack:
        for target, name, value in (*ANSWERS, *TENSOR_ANSWERS):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(cuda_kernels())
        python = _FromPython(device)
        stack.enter_context(_FromCpp(device, python))
        stack.enter_context(python)
        yield


class _FromPython(TorchFunctionMode):
    """What Python asks of C++. asked: how many calls that name "meta" are running

    A copy of a tensor to its device copies nothing. C++ finds the tensor on "meta" and must see this.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.asked = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD:
            return leave(self, func, args, kwargs)
        # An operation is called by other modes, on its way from C++.
        named = not isinstance(func, OpOverload) and any(map(is_meta, (*args, *kwargs.values())))
        if func in (Tensor.to, Tensor.cuda) and args[0].device == self.device:
            if func is Tensor.cuda:
                return args[0]
            args = (args[0], *map(self._seen, args[1:]))
            kwargs = {name: self._seen(value) for name, value in kwargs.items()}
        self.asked += named
        try:
            return func(*args, **kwargs)
        finally:
            self.asked -= named

    def _seen(self, value: Any) -> Any:
        same = isinstance(value, str | torch.device) and torch.device(value).type == self.device.type
        return META if same else value


class _FromCpp(FakeTensorMode):
    """What C++ asks of the kernels. A tensor that it creates on "meta" is on the device, unless Python named "meta" or
    an argument is on "meta". A mode above this one would miss operations that torch splits into others."""

    def __init__(self, device: torch.device, python: _FromPython) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device, self.python = device, python

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_meta(kwargs.get("device")) and not self.python.asked:
            given = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            if not any(tensor.device.type == "meta" for tensor in given):
                kwargs = {**kwargs, "device": self.device}
        if func is torch.ops.aten._pin_memory.default:  # torch's fake tensors have no such thing
            return args[0].clone()
        return super().dispatch(func, types, args, kwargs)


def is_meta(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value) == "meta"


MAKE_SUBCLASS = Tensor._make_subclass  # pyright: ignore
GROUP_TENSORS: Any = torch._C._group_tensors_by_device_and_dtype  # pyright: ignore


def _make_subclass(cls: Any, data: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A fake tensor on "cuda" keeps the kernels of "cuda", and C++ no longer asks Python for its device."""
    if issubclass(cls, FakeTensor):
        if missing := [name for name in SEEN if name not in kwargs]:
            raise RunError(
                f"no rehearsal of device cuda with torch {torch.__version__}: it makes fake tensors without "
                f"{missing[0]}; use torch 2.11 to 2.14, or rehearsal.device=cpu"
            )
        if torch.device(kwargs["device_for_backend_keys"]).type == "cuda":
            kwargs["dispatch_device"] = False
    return MAKE_SUBCLASS(cls, data, *args, **kwargs)


def _group_tensors(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
    """An optimizer groups its tensors by device: by the one that Python knows."""
    groups = GROUP_TENSORS(lists, with_indices)
    return {(tensors[0][0][0].device, dtype): tensors for (_, dtype), tensors in groups.items()}


TENSOR_ANSWERS: tuple[Answer, ...] = (
    (Tensor, "_make_subclass", staticmethod(_make_subclass)),
    (torch._C, "_group_tensors_by_device_and_dtype", _group_tensors),  # pyright: ignore
    (DTensor, "device", property(lambda tensor: tensor._local_tensor.device)),
    *(
        answer
        for kind in (FakeTensor, DTensor)
        for answer in (
            (kind, "get_device", lambda tensor: tensor.device.index if tensor.device.type == "cuda" else -1),
            (kind, "is_cuda", property(lambda tensor: tensor.device.type == "cuda")),
            (kind, "is_meta", property(lambda tensor: tensor.device.type == "meta")),
        )
    ),
)
