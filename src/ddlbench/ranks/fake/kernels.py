"""What torch's C++ code chooses by the device, for tensors on "cuda" that it finds on "meta" (ranks/fake/cuda.py).

Autocast, dropout, softmax and attention ask `is_cuda` before any kernel is chosen. Here they get the choice for "cuda":
types of autocast as ATen/autocast_mode.h lists them, dropout and softmax as one kernel, attention as one kernel of an
A100 or H100.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ddlbench.errors import RunError

aten = torch.ops.aten
# Computed in the type of autocast. All others that autocast knows are computed in fp32; if an operation has an argument
# for the type of its result, its inputs are not copied. Some that no model here has would use the widest input type.
LOWER = {
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
}  # fmt: skip
# Left to torch: the first is refused by autocast, the second is never chosen for what C++ finds on "meta".
LEFT = {"binary_cross_entropy", "_cudnn_rnn"}
AUTOCAST = "AutocastCUDA"
CLEAR_CACHE = torch.clear_autocast_cache  # torch's own


@contextmanager
def cuda_kernels() -> Generator[None]:
    library = torch.library.Library("aten", "IMPL")
    cast = _Cast()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a kernel that replaces another one
        library.impl("dropout", dropout, "AutogradCUDA")
        library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
        for name in ("softmax", "log_softmax"):
            library.impl(f"{name}.int", partial(softmax, getattr(aten, f"_{name}")), "AutogradCUDA")
        for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST):  # pyright: ignore
            namespace, _, name = qualified.partition("::")
            if namespace == "aten" and name.partition(".")[0] not in LEFT:
                library.impl(name, _autocast(name, cast), AUTOCAST)
    try:
        with patch.object(torch, "clear_autocast_cache", cast.clear):
            yield
    finally:
        library._destroy()  # pyright: ignore[reportPrivateUsage]


def _autocast(name: str, cast: _Cast) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation: Any = getattr(getattr(aten, packet), overload or "default")
    arguments = operation._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST))  # pyright: ignore

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):  # pyright: ignore
            if "dtype" in defaults:  # the result in fp32, unless the arguments name another type
                # The dispatcher leaves default values out.
                given = {**defaults, **dict(zip((item.name for item in arguments), args, strict=False)), **kwargs}
                if eligible(args[0]) and given["dtype"] is None:
                    given["dtype"] = torch.float32
                return operation(**given)
            dtype = torch.get_autocast_dtype("cuda") if packet in LOWER else torch.float32
            args, kwargs = tree_map(lambda leaf: cast(leaf, dtype) if eligible(leaf) else leaf, (args, kwargs))
            return operation(*args, **kwargs)

    return call


def eligible(value: Any) -> bool:
    """Whether autocast casts this value."""
    on_device = isinstance(value, Tensor) and value.device.type == "cuda"
    return on_device and value.is_floating_point() and value.dtype != torch.float64


class _Cast:
    """Autocast's cache: a weight is cast once, until the outermost autocast ends."""

    def __init__(self) -> None:
        self.kept = dict[int, tuple[Tensor, Tensor]]()  # by the weight's identity: the weight, and its cast

    def __call__(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype:
            return tensor
        weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()  # pyright: ignore
        if not weight or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        if id(tensor) not in self.kept:
            self.kept[id(tensor)] = tensor, tensor.to(dtype)
        return self.kept[id(tensor)][1]

    def clear(self) -> None:
        self.kept.clear()
        CLEAR_CACHE()


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """One kernel, which keeps a mask of booleans."""
    if not train or p == 0 or not input.numel():
        return input
    return input * torch.zeros_like(input) if p == 1 else aten.native_dropout(input, p, train)[0]


def softmax(kernel: Any, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """One kernel, from fp16 to fp32 too, without a copy of its input."""
    if tensor.dtype == torch.float16 and dtype == torch.float32:
        return kernel(tensor, dim, True)
    return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """FlashAttention for 16 bits without a mask, the memory-efficient kernel for others: torch's order of choice."""
    if enable_gqa:
        raise RunError("attention with grouped queries is not rehearsed on device cuda: use rehearsal.device=cpu")
    if query.dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    kept = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, kept, dropout_p, is_causal, scale=scale
    )[0]
