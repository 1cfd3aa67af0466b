"""What C++ chooses for "cuda": types of autocast against torch's own, dropout and attention as one kernel."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddlbench.ranks import fake_cuda
from ddlbench.ranks.fake import ANSWERS
from ddlbench.ranks.fake_device import fake_device
from ddlbench.ranks.fake_kernels import LOWER, RESULT, WIDEST, autocast_operations, cuda_kernels

CUDA = torch.device("cuda", 0)
ALIKE = {"cudnn_batch_norm": "native_batch_norm"}  # chosen by the device; types are the same


class Types(TorchDispatchMode):
    """Name and types of results of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func._overloadpacket).removeprefix("aten.")
        made = [leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        self.seen.append((ALIKE.get(name, name), made[:1]))
        return out


@contextmanager
def fake_gpu(ours: bool) -> Generator[None]:
    """ours: as a rehearsal has it; else as torch has it, which makes no backward pass without a GPU"""
    with ExitStack() as stack:
        for target, name, value in (*ANSWERS, *fake_cuda.ANSWERS):
            stack.enter_context(patch.object(target, name, value))
        if ours:
            stack.enter_context(fake_device(CUDA))
        else:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(cuda_kernels(casts=False))
        yield


def test_every_operation_of_the_lists_is_one_of_autocast() -> None:
    known = {name.partition(".")[0] for name in autocast_operations()}
    assert known >= RESULT | WIDEST | LOWER - {"_scaled_dot_product_flash_attention", "linalg_vecdot", "vdot"}
    assert len(LOWER | WIDEST | RESULT) == len(LOWER) + len(WIDEST) + len(RESULT)


def test_a_weight_is_cast_once_until_autocast_ends() -> None:
    with fake_gpu(ours=True):
        weight = torch.ones(4, 4, device=CUDA, requires_grad=True)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16), Types() as found:
                _ = weight @ weight, weight @ weight
            assert [name for name, _ in found.seen].count("_to_copy") == 1


def test_dropout_keeps_booleans() -> None:
    """On the CPU it keeps its noise as numbers."""
    with fake_gpu(ours=True):
        kept = list[torch.Tensor]()
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda none: none):  # pyright: ignore
            functional.dropout(torch.ones(8, device=CUDA, requires_grad=True), 0.5)
            assert functional.dropout(torch.ones(8, device=CUDA), 0.5, training=False).dtype == torch.float32
        assert [each.dtype for each in kept] == [torch.bool]


@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_is_one_kernel(dtype: torch.dtype, mask: bool, kernel: str) -> None:
    with fake_gpu(ours=True), Types() as found:
        query = torch.ones(2, 4, 16, 8, device=CUDA, dtype=dtype, requires_grad=True)
        bias = torch.zeros(16, 16, device=CUDA, dtype=dtype) if mask else None
        functional.scaled_dot_product_attention(query, query, query, bias, dropout_p=0.1).sum().backward()
        assert query.grad is not None
        assert query.grad.dtype == dtype
    names = [name for name, _ in found.seen]
    assert kernel in names
    assert f"{kernel}_backward" in names
