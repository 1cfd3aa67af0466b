"""What a process holds: live tensors, by the storages they are in, and what malloc has given out, by its own count."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddlbench.frameworks.deepspeed.adapter import ZeroTrainer
from ddlbench.job import Trainer

LARGE = 2**14  # bytes
Storages = dict[int, int]  # address -> bytes


class Info(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def map_large_blocks() -> None:
    """From now on malloc takes every block of LARGE bytes or more from the system by itself, and so counts them apart
    from the many small ones of Python. It would use free memory of the heap first: that is taken here, and kept."""
    threshold, library, size = -3, ctypes.CDLL(None), 2**26  # M_MMAP_THRESHOLD of malloc.h
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    assert library.mallopt(threshold, LARGE) == 1
    while size >= LARGE:
        before, block = large_blocks(), library.malloc(size)
        if large_blocks() > before:  # the heap has no free block of this size
            library.free(block)
            size //= 2


def large_blocks() -> int:
    """Bytes in such blocks that were allocated and not freed, by any library."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    return mallinfo().hblkhd


def settled_blocks() -> int:
    """large_blocks once they stay the same: threads of a library free what a closed framework sent some time later."""
    blocks = large_blocks()
    while True:
        time.sleep(0.1)
        earlier, blocks = blocks, large_blocks()
        if earlier == blocks:
            return blocks


def live_tensors() -> Iterator[Tensor]:
    """All tensors that Python's garbage collector knows."""
    gc.collect()
    return (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))


def storages(tensors: Iterable[Tensor]) -> Storages:
    """The storages of CPU tensors that have memory; for a DTensor, of this rank's slice."""
    sizes: Storages = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if type(local) in (Tensor, nn.Parameter) and local.device.type == "cpu":
            memory = local.untyped_storage()
            sizes[memory.data_ptr()] = memory.nbytes()
    return sizes


def total(sizes: Storages, *counted: Storages) -> int:
    """Bytes of those that are not counted already."""
    return sum(size for address, size in sizes.items() if not any(address in others for others in counted))


def model_of(trainer: Any) -> nn.Module:
    return trainer.engine.module if isinstance(trainer, ZeroTrainer) else trainer.model


def parameters(trainer: Trainer) -> Storages:
    weights = list(model_of(trainer).parameters())
    return storages([*weights, *(weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor"))])


def gradients(trainer: Any) -> Storages:
    tensors = [tensor.grad for tensor in live_tensors() if tensor.is_leaf and tensor.grad is not None]
    if isinstance(trainer, ZeroTrainer):
        groups = trainer.engine.optimizer.averaged_gradients.values()
        tensors += [part for parts in groups if parts is not None for part in parts]
    return storages(tensors)


def optimizer(trainer: Any) -> Storages:
    """DeepSpeed's stage 3 shows the optimizer its copy of the weights during the update only."""
    values = [value for state in trainer.optimizer.state.values() for value in state.values()]
    values += [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    if isinstance(trainer, ZeroTrainer):
        values += getattr(trainer.engine.optimizer, "fp32_partitioned_groups_flat", [])
    return storages(value for value in values if isinstance(value, Tensor))


def before_update(trainer: Any, act: Callable[[], None]) -> None:
    """`act` when the gradients are ready and the weights still old."""
    owner, name = (trainer.engine, "step") if isinstance(trainer, ZeroTrainer) else (trainer.update, "apply")
    update = getattr(owner, name)

    def first(*args: Any, **kwargs: Any) -> Any:
        act()
        return update(*args, **kwargs)

    setattr(owner, name, first)


def watch_gradients(model: nn.Module, most: list[int]) -> None:
    """Notes what the gradients take whenever one has arrived."""

    def note(_: Tensor) -> None:
        most.append(total(storages(weight.grad for weight in model.parameters() if weight.grad is not None)))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
