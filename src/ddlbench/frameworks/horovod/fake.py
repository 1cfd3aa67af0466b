"""Horovod as one rank of a world that does not exist (ranks/fake/fake.py): its compiled part answers from here.

Its Python part stays: the optimizer, the hooks on gradients, compression. An all-reduce of Horovod's becomes one of
torch's fake process group, gradient by gradient: which of them Horovod's core would send in one message depends on
time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.ranks.fake.answers import Answer, returning

ALL_REDUCE = "horovod_torch_allreduce_async_"


def answers(rank: int, world_size: int, device: torch.device) -> list[Answer]:
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
    """The all-reduces, for the types of tensors that the library has one for."""

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

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        """It ended when it began."""

    def horovod_torch_poll(self, handle: int) -> int:
        return 1
