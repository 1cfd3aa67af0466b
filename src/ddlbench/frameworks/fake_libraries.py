"""DeepSpeed and Horovod as one rank of a world that does not exist (ranks/fake/fake.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ddlbench.ranks.fake.cuda import Answer, returning

ALL_REDUCE = "horovod_torch_allreduce_async_"


def deepspeed_answers(device: torch.device) -> list[Answer]:
    """A GPU without a driver, ranks that agree.

    Replaced are only its accelerator object, of which DeepSpeed asks everything about devices, and the comparison of
    numbers with those of rank 0. torch.cuda.is_available stays as it is, because other libraries choose kernels by it.
    """
    utils = import_module("deepspeed.runtime.zero.utils")
    given: list[Answer] = [
        (utils, "get_lst_from_rank0", list),  # its own numbers
        (utils, "assert_lst_len_same_as_other_ranks", returning(None)),
        # Stage 3 replaces it by its own function and leaves it there: the next framework that is rehearsed must get
        # torch's.
        (functional, "linear", functional.linear),
    ]
    if device.type == "cuda":
        # DeepSpeed's own accelerator for CUDA, of which everything fits into the memory. Stage 3 divides by the number
        # of devices of a node, and uses the result for quantized gradients only.
        gpu = import_module("deepspeed.accelerator.cuda_accelerator").CUDA_Accelerator()
        says = {"is_available": True, "available_memory": sys.maxsize, "device_count": 1}
        ignored = ("empty_cache", "range_push", "range_pop", "reset_peak_memory_stats")
        for name, value in {**says, **dict.fromkeys(ignored)}.items():
            setattr(gpu, name, returning(value))
        given.append((import_module("deepspeed.accelerator.real_accelerator"), "ds_accelerator", gpu))
    return given


def horovod_answers(rank: int, world_size: int, device: torch.device) -> list[Answer]:
    """Its compiled part answers from here; its Python part stays: the optimizer, the hooks on gradients, compression.
    An all-reduce of Horovod's becomes one of torch's fake process group, gradient by gradient: which of them Horovod's
    core would send in one message depends on time."""
    operations: Any = import_module("horovod.torch.mpi_ops")
    everyone = import_module("horovod.common.process_sets").global_process_set
    basics = operations._basics
    # A Horovod that has started and was built for the device; the rest is the library's.
    given = {"is_initialized": 1, "rank": rank, "size": world_size, "nccl_built": int(device.type == "cuda")}
    given |= {"mpi_enabled": 0, "gloo_enabled": 1}
    return [
        *((basics.MPI_LIB_CTYPES, f"horovod_{name}", returning(value)) for name, value in given.items()),
        (operations, "mpi_lib", Operations(operations.mpi_lib)),
        (everyone, "ranks", list(range(world_size))),
    ]


class Operations:
    """Horovod's all-reduces, for the types of tensors that the library has one for."""

    # An all-reduce has ended when it begins.
    horovod_torch_wait_and_clear, horovod_torch_poll = returning(None), returning(1)

    def __init__(self, library: Any) -> None:
        self.library = library
        self.handle = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        # A library built for the CPU has no others. A fake tensor on "cuda" is on "meta" where C++ names its type.
        on_cpu = name.replace("torch_cuda_", "torch_").replace("torch_meta_", "torch_")
        if not name.startswith(ALL_REDUCE) or not hasattr(self.library, on_cpu):
            raise AttributeError(name)
        return self._all_reduce

    def _all_reduce(self, tensor: Tensor, output: Tensor, *_: Any) -> int:
        dist.all_reduce(output.detach())
        self.handle += 1
        return self.handle
