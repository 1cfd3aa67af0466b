"""One rank of a fake world: torch's fake process group and fake tensors, on a machine without devices.

A collective returns at once and sends nothing; a tensor has a shape, a type and a device, but no memory. A framework
can therefore be set up and make steps as any rank of any number of ranks, also on "cuda" without a GPU. cuda.py
replaces what torch asks of a real device, the adapters (`fake_answers`) what other libraries ask.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param  # pyright: ignore[reportPrivateUsage]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddlbench.ranks.fake.cuda import RUN_BACKWARD, Answer, fake_device, returning


@contextmanager
def fake_world(rank: int, world_size: int, device: torch.device, framework: object = None) -> Generator[None]:
    """In this context the process is `rank` of `world_size` ranks, and tensors are fake. No process group may exist
    before. framework: the one that is set up; where its library asks other ranks or the driver for more than torch
    does, its method `fake_answers` gives the answers"""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch.testing._internal.distributed.fake_pg import FakeStore

    get_torch_obj_rule_map()  # made once, of torch's functions as they are at that moment
    more: Callable[..., Sequence[Answer]] = getattr(framework, "fake_answers", returning(()))
    asked = more(rank, world_size, device)
    # Each operation of a fake tensor asks for it, and where DeepSpeed is imported NVML is loaded to answer.
    once: Answer = (torch.cuda, "is_available", returning(torch.cuda.is_available()))

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    cuda = device.type == "cuda"
    try:
        with ExitStack() as stack:
            for target, name, value in (*ANSWERS, once, *asked):
                stack.enter_context(patch.object(target, name, value))
            stack.enter_context(fake_device(device) if cuda else FakeTensorMode(allow_non_fake_inputs=True))
            yield
    finally:
        dist.destroy_process_group()


def _swap(one: Tensor, other: Tensor) -> None:
    """torch.utils.swap_tensors, which `Module.to` uses for fake parameters, refuses tensors that something refers to
    weakly: the fake mode does so with every tensor."""
    attributes = vars(one).copy(), vars(other).copy()
    for tensor, its_attributes in zip((other, one), attributes, strict=True):
        vars(tensor).clear()
        vars(tensor).update(its_attributes)
    one.__class__, other.__class__ = other.__class__, one.__class__
    torch._C._swap_tensor_impl(one, other)  # pyright: ignore


class _Chunks:
    """The slices of a parameter for all ranks, each made when it is read: fully_shard reads two of them, but makes one
    for each rank, and 1,024 fake tensors for each parameter take most of the time of a rehearsal."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.size = -(-tensor.size(dim) // count)  # as torch.chunk divides it: the last ones are smaller, or empty

    def __getitem__(self, index: int) -> Tensor:
        length = self.tensor.size(self.dim)
        start = min(index * self.size, length)
        return self.tensor.narrow(self.dim, start, min(self.size, length - start))


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


MODEL: Any = DistributedDataParallel
REDUCER: Any = dist.Reducer  # pyright: ignore
PRE_FORWARD, REBUILD = MODEL._pre_forward, REDUCER._rebuild_buckets  # torch's own


def _with_future(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective with a future that holds its first argument, the result, like that of a real group."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if collective(*args, **kwargs) is None:  # nobody waits for it
            return None
        result, future = (*args, *kwargs.values())[0], Future[list[Tensor]]()
        future.set_result(result if isinstance(result, list) else [result])
        ended = returning(True)
        return SimpleNamespace(wait=ended, is_completed=ended, get_future=returning(future))

    return called


def _pre_forward(model: Any, *inputs: Any, **kwargs: Any) -> Any:
    """DDP's preparation of a forward pass, with the hook in Python from the first forward pass on."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # takes a while to import

    with suppress(RuntimeError):  # the model has a hook: the framework's, or this one
        dist._register_comm_hook(model.reducer, model.process_group, allreduce_hook)  # pyright: ignore
    return PRE_FORWARD(model, *inputs, **kwargs)


def _rebuild_buckets(reducer: Any) -> bool:
    with _RealIntegers():
        return REBUILD(reducer)


ANSWERS: tuple[Answer, ...] = (
    (_fsdp_param, "_chunk_with_empty", _Chunks),
    (torch.utils, "swap_tensors", _swap),
    # A mesh counts its ranks with tensors of integers, whose values it reads.
    (DeviceMesh, "__init__", unset_fake_temporarily()(DeviceMesh.__init__)),
    (DeviceMesh, "from_group", unset_fake_temporarily()(DeviceMesh.from_group)),
    # DDP's reducer is torch's, in C++. It sends by torch's hook in Python, because the built-in one needs a result that
    # the fake process group does not give. It can read the numbers that ranks exchange about their buckets. Its method
    # `prepare_for_forward` only starts a timer of the device.
    (MODEL, "_pre_forward", _pre_forward),
    (REDUCER, "prepare_for_forward", returning(None)),
    (REDUCER, "_rebuild_buckets", _rebuild_buckets),
    (dist, "all_reduce", _with_future(dist.all_reduce)),
    (dist, "all_gather", _with_future(dist.all_gather)),
    # A future asks for the devices of its tensors; the memory of a fake tensor is on no device.
    (torch._jit_internal, "_extract_tensors", returning(list[Tensor]())),  # pyright: ignore
    (torch.autograd, "_engine_run_backward", RUN_BACKWARD),
)
