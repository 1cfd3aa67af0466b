"""Observes one block while it runs forward and backward under fake tensors: FLOPs, bytes, what autograd saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.counts.counts import Exchange, Rows
from ddlbench.frameworks.spatial.layers import window_of
from ddlbench.frameworks.tensor.collectives import sum_type
from ddlbench.measure.formulas.flops import is_costly, operation_flops
from ddlbench.ranks.fake.storages import Alive, identity, tensors, unknown

WITHOUT_WORK = ("empty", "detach", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh")
# Styles of `Model.tensor_plan` whose modules compute their own part only.
SHARED = ("column", "qkv", "row", "heads", "vocab", "logits", "filter", "channel", "norm", "channels", "dropout")


@dataclass(frozen=True)
class Operation:
    """One operation. moved: bytes read and written, each tensor once; shared: whether tensor parallelism divides it;
    live: bytes in memory after it"""

    name: str
    flops: float
    moved: float
    shared: bool
    live: float


class Observer(TorchDispatchMode):
    """The operations of a block, the modules that other ranks may share, and the layers whose windows reach over a
    border.

    Bytes of exchanges and rows are those of one sample, all others those of the complete batch. weighted_outputs: bytes
    of the outputs of modules with parameters
    """

    def __init__(self, samples: int, uncounted: Iterable[Tensor], block_input: Tensor) -> None:
        """uncounted: tensors that are no activations of this block: weights, targets, an input that is saved already"""
        super().__init__()
        self.samples = samples
        self.operations = list[Operation]()
        self.exchanges, self.rows = list[Exchange](), list[Rows]()
        self.weighted_outputs = 0
        self.shared_depth = 0  # modules around the current operation that tensor parallelism divides
        self.keep: Callable[[Tensor], object] | None = None  # called with the outputs of costly operators
        self.made_at = dict[int, int]()  # storage -> index of the operation
        self.alive = Alive(torch.device("cpu"))
        for tensor in uncounted:
            self.alive.made(tensor)
        self.start = self.alive.bytes_
        self.alive.made(block_input)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return unknown(args[0].dtype)  # ranks that share layers draw their seeds
        name, made = str(func._overloadpacket).removeprefix("aten."), list(tensors(out))
        for tensor in made:
            if identity(tensor) not in self.alive.sizes:
                self.made_at[identity(tensor)] = len(self.operations)
            self.alive.made(tensor)
            if self.keep and is_costly(func):
                self.keep(tensor)
        moved = 0.0
        if made and not func.is_view and name not in WITHOUT_WORK:
            # Each tensor once, with the memory behind it: it may be expanded. Of an embedding, the rows of its result.
            used = made if name == "embedding" else [*tensors((args, kwargs or {})), *made]
            bytes_ = {id(tensor): min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in used}
            moved = float(sum(bytes_.values())) * (2 if name == "embedding" else 1)
        flops = operation_flops(func, args, kwargs, out) if moved else 0.0
        live = float(self.alive.bytes_ - self.start)
        self.operations.append(Operation(name, flops, moved, self.shared_depth > 0, live))
        return out

    @contextmanager
    def modules(self, name: str, block: nn.Module, plan: Mapping[str, str]) -> Generator[None]:
        """Observe the modules of a block during its forward pass. plan: the model's tensor plan"""
        modules = {f"{name}.{child}" if child else name: module for child, module in block.named_modules()}
        hooks = [hook for child, module in modules.items() for hook in self._observe(child, plan, module)]
        yield
        for hook in hooks:
            hook.remove()

    def _observe(self, name: str, plan: Mapping[str, str], module: nn.Module) -> Sequence[Any]:
        """Add hooks to one module, and return them."""
        style = plan.get(name)
        inner = {style for child, style in plan.items() if child.rpartition(".")[0] == name}
        # The modules between a layer split by outputs and a layer split by inputs are shared, too.
        shared = style in SHARED or ("." in name and {"column", "row"} <= inner)

        def before(*_: object) -> None:
            self.shared_depth += shared

        def after(layer: Any, given: Sequence[Any], out: Any) -> None:
            self.shared_depth -= shared
            entering, value = given[0], out[0] if isinstance(out, tuple) else out
            # Under autocast the input is cast before it is sent (`in_autocast_type`).
            number_bytes = value.element_size() if entering.is_floating_point() else entering.element_size()
            bytes_in, first = entering.numel() * number_bytes, not entering.requires_grad
            if style is not None:
                sizes = bytes_in / self.samples, value.nbytes / self.samples
                added_on_cpu = sum_type(value.dtype, adds_bf16=False).itemsize / value.element_size()
                self.exchanges.append(Exchange(style, *sizes, first, added_on_cpu))
            if next(layer.parameters(recurse=False), None) is not None:
                self.weighted_outputs += value.nbytes
            if isinstance(layer, nn.Conv2d | nn.MaxPool2d) and (window := window_of(layer, entering.shape[-2])):
                self.rows.append(Rows(name, window, bytes_in / window.height / self.samples, first))

        return module.register_forward_pre_hook(before), module.register_forward_hook(after)

    def accumulating(self, gradients: Iterable[Tensor | None], begin: int) -> list[float]:
        """Bytes in memory from operation `begin` on if gradients are added to existing gradients. A gradient then
        exists for one operation."""
        live = [operation.live for operation in self.operations[begin:]]
        for gradient in gradients:
            if gradient is not None:
                for index in range(self.made_at[identity(gradient)] - begin + 1, len(live)):
                    live[index] -= gradient.nbytes
        return live


@contextmanager
def saved_bytes(counted: set[int], selective: Observer | None = None) -> Generator[list[float]]:
    """Bytes of the storages that autograd saves. A storage counts once: storages in `counted` do not count, and new
    storages are added to it while they exist. So a storage that two blocks save counts for the first block. selective:
    observes a block that also keeps the outputs of costly operators"""
    total = [0.0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (key := identity(tensor)) not in counted:
            counted.add(key)
            weakref.finalize(storage, counted.discard, key)
            total[0] += storage.nbytes()
        return tensor

    if selective:
        selective.keep = pack
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    if selective:
        selective.keep = None
