"""What C++ chooses for "cuda": types of autocast against torch's own, dropout and attention as one kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # imported before anything of torch is replaced
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddlbench.ranks.fake import cuda as fake_cuda
from ddlbench.ranks.fake.cuda import fake_device
from ddlbench.ranks.fake.fake import ANSWERS
from ddlbench.ranks.fake.kernels import LOWER

CUDA = torch.device("cuda", 0)
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
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
        if not name.startswith("prim."):  # asks for a device
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
        yield


def test_what_computes_in_the_lower_type_is_that_of_torch() -> None:
    """Only operations that the header of this version of torch has, by policy: `#define AT_FORALL_FP32(_)`, then
    `_(exp)` or `_(ADD_NS(norm), ...)` in each line."""
    macros = re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*)", HEADER.read_text())
    torchs = {name: set(re.findall(r"\b_\((?:ADD_NS\()?(\w+)", body)) for name, body in macros}
    assert LOWER & set[str]().union(*torchs.values()) == torchs["LOWER_PRECISION_FP"]


Call = Callable[[torch.Tensor, torch.Tensor], Any]  # of two matrices, in the type of autocast and in fp32
CALLS: dict[str, Call] = {
    "mm": lambda low, full: low @ full,
    "linear": lambda low, full: functional.linear(full, low, full[0]),
    "einsum": lambda low, full: torch.einsum("ij,jk->ik", low, full),
    "baddbmm": lambda low, full: torch.baddbmm(full[None], low[None], full[None]),
    "conv2d": lambda low, full: functional.conv2d(full[None, None], low[None, None]),
    "prelu": lambda low, full: functional.prelu(full, low[0, :1]),
    "exp": lambda low, _: low.exp(),
    "pow": lambda low, _: low**2,
    "layer_norm": lambda low, full: functional.layer_norm(low, [4], full[0]),
    "cross_entropy": lambda low, _: functional.cross_entropy(low, torch.zeros(4, dtype=torch.int64, device=CUDA)),
    "mse_loss": lambda low, full: functional.mse_loss(low, full),
    "logsumexp": lambda low, _: low.logsumexp(0),
    "softmax": lambda low, full: (low.softmax(0), low.log_softmax(0), full.softmax(0)),
    "sum": lambda low, _: (low.sum(), low.sum(0), low.sum(dtype=low.dtype)),
    "prod": lambda low, _: low.prod(0),
    "vector_norm": lambda low, _: torch.linalg.vector_norm(low),
    "binary": lambda low, full: (low + full, low * low, torch.cat([low, full])),
    "relu": lambda low, _: low.relu(),
    "gelu": lambda low, _: functional.gelu(low),
}


def types_of(call: Call, dtype: torch.dtype, ours: bool) -> list[tuple[str, list[torch.dtype]]]:
    with fake_gpu(ours):
        low, full = (torch.ones(4, 4, device=CUDA, dtype=each, requires_grad=True) for each in (dtype, torch.float32))
        with torch.autocast("cuda", dtype), Types() as result:
            call(low, full)
    return result.seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_operations_compute_in_the_types_of_torchs_own_autocast(name: str, dtype: torch.dtype) -> None:
    """They are equal operations with results of equal types, casts included."""
    assert types_of(CALLS[name], dtype, ours=True) == types_of(CALLS[name], dtype, ours=False)


def test_a_weight_is_cast_once_until_autocast_ends() -> None:
    with fake_gpu(ours=True):
        weight = torch.ones(4, 4, device=CUDA, requires_grad=True)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16), Types() as result:
                _ = weight @ weight, weight @ weight
            assert [name for name, _ in result.seen].count("_to_copy") == 1


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
    with fake_gpu(ours=True), Types() as result:
        query = torch.ones(2, 4, 16, 8, device=CUDA, dtype=dtype, requires_grad=True)
        bias = torch.zeros(16, 16, device=CUDA, dtype=dtype) if mask else None
        functional.scaled_dot_product_attention(query, query, query, bias, dropout_p=0.1).sum().backward()
        assert query.grad is not None
        assert query.grad.dtype == dtype
    names = [name for name, _ in result.seen]
    assert kernel in names
    assert f"{kernel}_backward" in names
