"""DistributedDataParallel's reducer in a fake world (ranks/fake/fake.py).

The reducer is torch's, in C++. It sends by torch's hook in Python, because the built-in one needs a result that the
fake process group does not give. It can read the numbers that ranks exchange about their buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _RealIntegers(TorchDispatchMode):
    """Tensors of int32 that are created in this mode are real and on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if given and all(tensor.dtype == torch.int32 and not isinstance(tensor, FakeTensor) for tensor in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not given and kwargs.get("dtype") == torch.int32:
            with unset_fake_temporarily():
                return func(*args, **{**kwargs, "device": torch.device("cpu")})
        return func(*args, **kwargs)


class _Done:
    """The work of a collective that has ended."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result([self.tensor])
        return future


def _all_reduce(send: Callable[..., Any]) -> Callable[..., Any]:
    """An all-reduce with a future that holds the result, like that of a real group."""

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = send(tensor, *args, **kwargs)
        return None if work is None else _Done(tensor)

    return call


def _pre_forward(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's preparation of a forward pass, with the hook in Python from the first forward pass on."""

    def call(model: Any, *inputs: Any, **kwargs: Any) -> Any:
        with suppress(RuntimeError):  # there is one: the framework's own, or this one
            hook, group = allreduce_hook, model.process_group
            dist._register_comm_hook(model.reducer, group, hook)  # pyright: ignore
        return prepare(model, *inputs, **kwargs)

    return call


def _no_timer(_: object) -> None:
    """A replacement for a method that only starts a timer of the device."""


def _rebuild(rebuild: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def call(reducer: Any) -> bool:
        with _RealIntegers():
            return rebuild(reducer)

    return call


def _no_tensors(_: object) -> Sequence[Tensor]:
    """A future asks for the devices of its tensors; the memory of a fake tensor is on no device."""
    return []


MODEL: Any = DistributedDataParallel
REDUCER: Any = dist.Reducer  # pyright: ignore
ANSWERS: tuple[tuple[Any, str, Any], ...] = (
    (MODEL, "_pre_forward", _pre_forward(MODEL._pre_forward)),
    (REDUCER, "prepare_for_forward", _no_timer),
    (REDUCER, "_rebuild_buckets", _rebuild(REDUCER._rebuild_buckets)),
    (dist, "all_reduce", _all_reduce(dist.all_reduce)),
    (torch._jit_internal, "_extract_tensors", _no_tensors),  # pyright: ignore
)
