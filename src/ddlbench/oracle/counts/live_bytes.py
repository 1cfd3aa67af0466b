"""Bytes in memory while one block runs forward and backward under fake tensors, after each of its operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.rehearsal.observed import size, tensors, unknown
from ddlbench.rehearsal.storages import Alive, identity


class LiveBytes(TorchDispatchMode):
    """Counts storages from the operation that makes them until they are freed."""

    def __init__(self, uncounted: Iterable[Tensor], block_input: Tensor) -> None:
        """uncounted: weights, targets, and the input if an earlier block saved it"""
        super().__init__()
        self.alive = Alive(torch.device("cpu"))
        for tensor in uncounted:
            self.alive.made(tensor)
        self.start = self.alive.bytes_
        self.alive.made(block_input)
        self.after = list[float]()
        self.made_at = dict[int, int]()  # storage -> operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return unknown(args[0].dtype)  # ranks that share layers draw their seeds
        for tensor in tensors(out):
            if identity(tensor) not in self.alive.sizes:
                self.made_at[identity(tensor)] = len(self.after)
            self.alive.made(tensor)
        self.after.append(float(self.alive.bytes_ - self.start))
        return out

    def without(self, gradients: Iterable[Tensor | None], begin: int) -> list[float]:
        """The bytes from operation `begin` on if gradients are added to existing ones: a gradient lives for one
        operation."""
        live = self.after[begin:]
        for gradient in gradients:
            if gradient is not None:
                for index in range(self.made_at[identity(gradient)] - begin + 1, len(live)):
                    live[index] -= size(gradient)
        return live
