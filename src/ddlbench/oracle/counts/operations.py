"""Looks at the operations of one block as they run under fake tensors: FLOPs, bytes, what autograd keeps."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddlbench.measure.formulas.flops import operation_flops
from ddlbench.rehearsal.storages import identity

WITHOUT_WORK = ("empty", "detach", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh")
# Styles of `Model.tensor_plan` whose modules compute their own part only.
SHARED = ("column", "qkv", "row", "heads", "vocab", "logits", "filter", "norm", "channels", "dropout")


@dataclass(frozen=True)
class Operation:
    """One operation of one pass. bytes_: read and written, each tensor once."""

    name: str
    flops: float
    bytes_: float
    shared: bool


@dataclass
class Watch:
    """The operations of one block's forward and backward pass, and the modules that other ranks may share.

    modules: name, style, bytes in and out, and whether its input needs no gradient
    rows: name, halo, bytes of a row of the input, its height
    weighted_outputs: bytes of the outputs of modules with parameters
    """

    name: str
    block: nn.Module
    plan: Mapping[str, str]
    samples: int
    forward_operations: list[Operation] = field(default_factory=list[Operation])
    backward_operations: list[Operation] = field(default_factory=list[Operation])
    modules: list[tuple[str, str, float, float, bool]] = field(default_factory=list[Any])
    rows: list[tuple[str, int, float, int]] = field(default_factory=list[Any])
    depth: int = 0
    weighted_outputs: float = 0.0

    @contextmanager
    def forward(self) -> Generator[None]:
        handles = [handle for name, module in self.block.named_modules() for handle in self._hooks(name, module)]
        with _Mode(self.forward_operations, self):
            yield
        for handle in handles:
            handle.remove()

    @contextmanager
    def backward(self) -> Generator[None]:
        with _Mode(self.backward_operations, self):
            yield

    def _hooks(self, name: str, module: nn.Module) -> list[Any]:
        full = f"{self.name}.{name}" if name else self.name
        style = self.plan.get(full)
        handles: list[Any] = []
        if style in SHARED or _joins(full, self.plan):
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave))
        if style is not None:
            handles.append(module.register_forward_hook(lambda _, given, out: self._note(full, style, given, out)))
        if next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_forward_hook(self._add_output))
        if isinstance(module, nn.Conv2d | nn.MaxPool2d):
            handles.append(module.register_forward_hook(lambda layer, given, _: self._window(full, layer, given[0])))
        return handles

    def _enter(self, *_: object) -> None:
        self.depth += 1

    def _leave(self, *_: object) -> None:
        self.depth -= 1

    def _add_output(self, _module: object, _given: object, out: Tensor) -> None:
        self.weighted_outputs += out.numel() * out.element_size()

    def _note(self, name: str, style: str, given: Sequence[Any], out: Any) -> None:
        value = out[0] if isinstance(out, tuple) else out
        entering = given[0]
        # A matrix product under autocast casts its input before it is sent (frameworks/tensor/layers.py, `enter`).
        size = value.element_size() if entering.is_floating_point() else entering.element_size()
        first = not entering.requires_grad
        self.modules.append((name, style, entering.numel() * size, value.numel() * value.element_size(), first))

    def _window(self, name: str, module: Any, image: Tensor) -> None:
        """module: a convolution or pooling, with a kernel size and a stride"""
        kernel, stride = _height(module.kernel_size), _height(module.stride)
        halo = max(0, kernel - stride)
        height = image.shape[-2]
        self.rows.append((name, halo, image.numel() * image.element_size() / height, height))


def _height(size: Any) -> int:
    return size[0] if isinstance(size, tuple) else size


def _joins(name: str, plan: Mapping[str, str]) -> bool:
    """Whether a module goes from a layer split by outputs to one split by inputs: what lies between is shared too."""
    inner = {style for child, style in plan.items() if child.rpartition(".")[0] == name}
    return {"column", "row"} <= inner and "." in name


class _Mode(TorchDispatchMode):
    """Notes every operation that computes or moves something."""

    def __init__(self, operations: list[Operation], watch: Watch) -> None:
        super().__init__()
        self.operations, self.watch = operations, watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        moved = bytes_of(func, args, kwargs, out)
        if moved:
            name = str(func._overloadpacket).removeprefix("aten.")
            self.operations.append(
                Operation(name, operation_flops(func, args, kwargs, out), moved, self.watch.depth > 0)
            )
        return out


def bytes_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Bytes that an operation reads and writes. A view and memory without content count nothing, an embedding the rows
    that it reads."""
    name = str(func._overloadpacket).removeprefix("aten.")
    given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if name in WITHOUT_WORK or func.is_view or not made:
        return 0.0
    if name == "embedding":
        return 2.0 * sum(map(_size, made))
    return float(sum(map(_size, {id(tensor): tensor for tensor in (*given, *made)}.values())))


def _size(tensor: Tensor) -> int:
    """Bytes of the memory behind a tensor, which may be expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@contextmanager
def saved_bytes(counted: set[int]) -> Generator[list[float]]:
    """Bytes of the storages that autograd saves. A storage counts once: those in `counted` do not count, and new ones
    are added there while they live, so that what two blocks save counts for the first."""
    total = [0.0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (key := identity(tensor)) not in counted:
            counted.add(key)
            weakref.finalize(storage, counted.discard, key)
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
