"""DeepSpeed as one rank of a world that does not exist (ranks/fake/fake.py): a GPU without a driver, ranks that agree.

Replaced are only its accelerator object, of which DeepSpeed asks everything about devices, and the comparison of
numbers with those of rank 0. torch.cuda.is_available stays as it is, because other libraries choose kernels by it.
Stage 3 replaces torch.nn.functional.linear by its own function and leaves it there: the next framework that is
rehearsed must find torch's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from ddlbench.frameworks.deepspeed.knobs import import_deepspeed
from ddlbench.ranks.fake.answers import Answer, returning


def answers(device: torch.device) -> list[Answer]:
    """Unavailable where DeepSpeed cannot be imported."""
    # Without a GPU its import for "cuda" looks for CUDA's compiler.
    import_deepspeed(device if torch.cuda.is_available() else torch.device("cpu"))
    utils = import_module("deepspeed.runtime.zero.utils")
    given: list[Answer] = [
        (utils, "get_lst_from_rank0", list),  # its own numbers
        (utils, "assert_lst_len_same_as_other_ranks", returning(None)),
        (functional, "linear", functional.linear),
    ]
    if device.type == "cuda":
        given.append((import_module("deepspeed.accelerator.real_accelerator"), "ds_accelerator", gpu()))
    return given


def gpu() -> Any:
    """DeepSpeed's own accelerator for CUDA, of which everything fits into the memory."""
    accelerator = import_module("deepspeed.accelerator.cuda_accelerator").CUDA_Accelerator()
    # Stage 3 divides by the number of devices of a node, and uses the result for quantized gradients only.
    given = {"is_available": True, "available_memory": sys.maxsize, "device_count": 1}
    ignored = ("empty_cache", "range_push", "range_pop", "reset_peak_memory_stats")
    for name, value in {**given, **dict.fromkeys(ignored)}.items():
        setattr(accelerator, name, returning(value))
    return accelerator
