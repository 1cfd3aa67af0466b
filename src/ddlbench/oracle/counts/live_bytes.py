"""How many bytes live while one block runs forward and backward under fake tensors, after each of its operations."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.rehearsal.alive import Alive
from ddlbench.rehearsal.observed import identity, size, tensors, unknown


@dataclass(frozen=True)
class Passes:
    """Bytes after each operation: of the forward pass; of the backward pass with the gradients of parameters as they
    arrive; and of one whose gradients are added to others that do not count.

    freed: bytes of the input after each operation of the backward pass, 0 as long as the block needs it
    arrivals: which gradient is there after which operation of the backward pass; lingering: bytes of the output, where
    autograd does not keep it
    """

    ahead: list[float] = field(default_factory=list[float])
    back: list[float] = field(default_factory=list[float])
    added: list[float] = field(default_factory=list[float])
    freed: list[float] = field(default_factory=list[float])
    arrivals: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    lingering: float = 0.0

    def last_use(self, living: list[float]) -> list[float]:
        """Bytes of `back` or `added` if nothing else refers to the block's input."""
        return [live - freed for live, freed in zip(living, self.freed, strict=True)]


class Living(TorchDispatchMode):
    """Bytes of storages from the operation that makes them to their end, within one block."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        """given: weights, the block's input and what else does not count"""
        super().__init__()
        self.alive = Alive(torch.device("cpu"))
        for tensor in given:
            self.alive.made(tensor)
        self.start = self.alive.bytes_
        self.after, self.freed = list[float](), list[float]()
        self.ended = 0  # bytes of the input, once it has ended
        self.made_at = dict[int, int]()  # storage -> operation
        self.turned, self.idle, self.saved = 0, 0, 0
        self.used: float | None = None  # bytes when autograd first needs what it kept

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
        self.after.append(float(self.alive.bytes_ - self.start + self.ended))
        self.freed.append(float(self.ended))
        return out

    def enters(self, value: Tensor) -> None:
        """Note the block's input, because its end is counted separately."""

        def ended(size: int) -> None:
            self.ended = size

        storage = value.untyped_storage()
        weakref.finalize(storage, ended, storage.nbytes())

    def note_saved(self) -> None:
        """Note that autograd keeps something: a checkpointed block runs again up to here."""
        self.saved = len(self.after)

    def note_used(self) -> None:
        if self.used is None:
            self.used = self.now()

    def now(self) -> float:
        """Bytes, without the output that is freed before the backward pass."""
        return float(self.alive.bytes_ - self.start + self.ended - self.idle)

    def turn(self, output: Tensor, kept: set[int]) -> None:
        """Begin the backward pass. By then an output that the block itself does not keep has been freed."""
        self.turned = len(self.after)
        self.idle = 0 if identity(output) in kept else size(output)

    def added(self, parameters: Iterable[nn.Parameter], since: int) -> list[float]:
        """Bytes after each operation from `since` on, if gradients are added to others: a new one lives until the next
        one."""
        bytes_ = self.after[since:]
        for parameter in parameters:
            made = self.made_at.get(identity(parameter.grad), -1) - since if parameter.grad is not None else -1
            for index in range(made + 2, len(bytes_)):
                bytes_[index] -= size(parameter.grad) if made >= 0 and parameter.grad is not None else 0
        return bytes_

    def passes(self, gradients: Iterable[Tensor | None]) -> Passes:
        """The bytes of both passes. gradients: of the block's parameters; one that is added lives until the next one is
        made."""
        back = [bytes_ - self.idle for bytes_ in self.after[self.turned :]]
        added, arrivals = list(back), list[tuple[int, int]]()
        for which, gradient in enumerate(gradients):
            if gradient is not None:
                made = self.made_at[identity(gradient)] - self.turned
                arrivals.append((which, made))
                for index in range(made + 1, len(added)):
                    added[index] -= size(gradient)
        arrivals.sort(key=lambda arrival: arrival[1])
        return Passes(self.after[: self.turned], back, added, self.freed[self.turned :], arrivals, self.idle)
