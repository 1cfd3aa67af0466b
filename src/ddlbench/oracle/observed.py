"""What one fake rank holds, sends and reads in a step: storages, collectives, numbers that the host reads."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddlbench.job import Trainer
from ddlbench.oracle.watch import identity

READS = {Tensor.cpu: "cpu", Tensor.tolist: "tolist", Tensor.numpy: "numpy"}
# Frames between a read and the line that asks for it.
BETWEEN = ("torch/utils/", "torch/_subclasses/", "torch/_dynamo/", "torch/_compile.py", "torch/_ops.py",
           "torch/_tensor.py", "torch/overrides.py", "contextlib.py", __file__)  # fmt: skip


class Reads(TorchFunctionMode):
    """Methods that do not reach the dispatcher where nothing has to be copied. Counts by (call, where)."""

    def __init__(self, reads: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.reads[READS[func], where()] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Collectives by name: how many, and bytes of the whole message; `item` by the line that asks for the number.

    A number that follows from fake data is unknown: 1 is read instead, so that the step goes on.
    """

    def __init__(self, reads: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self.reads = reads
        self.counts, self.bytes_ = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2].strip("_")
            self.counts[name] += 1
            self.bytes_[name] += max((sum(map(size, tensors(argument))) for argument in args), default=0)
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        self.reads["item", where()] += 1
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            return unknown(args[0].dtype)


def unknown(dtype: torch.dtype) -> float | int | bool:
    """1 as a number of that type."""
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def where() -> str:
    """File and line of ddlbench that the host's read comes from, and of the library where that does it."""
    frame, first = inspect.currentframe(), None
    while frame is not None and not (file := frame.f_code.co_filename).endswith("oracle/rehearsal.py"):
        if not any(part in file for part in BETWEEN):
            place = f"{short(file)}:{frame.f_lineno}"
            if "/ddlbench/" in file:
                return place if first is None else f"{place} ({first})"
            first = first or place
        frame = frame.f_back
    return first or "unknown"


def short(file: str) -> str:
    """From the package on."""
    parts = Path(file).parts
    for folder in ("site-packages", "src"):
        if folder in parts:
            return str(Path(*parts[len(parts) - parts[::-1].index(folder) :]))
    return Path(file).name


def tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def stored(found: Iterable[Any], counted: set[int]) -> int:
    """Bytes of the storages of tensors, each once and whole; of a DTensor this rank's. Those in `counted` are left out,
    and all are added to it."""
    total = 0
    for tensor in found:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(own, Tensor) and identity(own) not in counted:
            counted.add(identity(own))
            total += own.untyped_storage().nbytes()
    return total


def parameters(trainer: Trainer) -> list[Any]:
    """Of this rank's model; DeepSpeed's stage 3 keeps its slices beside them."""
    plain: Any = trainer
    model: nn.Module = plain.engine.module if hasattr(plain, "engine") else plain.model
    own: list[Any] = list(model.parameters())
    return [*own, *(each.ds_tensor for each in own if hasattr(each, "ds_tensor"))]


def updated(trainer: Trainer) -> list[Any]:
    """What the optimizer updates: the model's parameters, or copies of its own."""
    return [each for group in trainer.optimizer.param_groups for each in group["params"]]


def gradients(trainer: Trainer) -> list[Any]:
    """What parameters have as their gradient, and what DeepSpeed keeps for its update."""
    plain: Any = trainer
    averaged = getattr(plain.engine.optimizer, "averaged_gradients", {}) if hasattr(plain, "engine") else {}
    kept = [part for parts in averaged.values() if parts is not None for part in parts]
    return [*(each.grad for each in (*parameters(trainer), *updated(trainer))), *kept]


def before_update(trainer: Trainer, act: Callable[[], None]) -> None:
    """`act` whenever the gradients are complete and the weights still old. DeepSpeed copies and drops gradients before
    its optimizer begins."""
    plain: Any = trainer
    if not hasattr(plain, "engine"):
        trainer.optimizer.register_step_pre_hook(lambda *_: act())
        return
    update = plain.engine.step

    def first(*args: Any, **kwargs: Any) -> Any:
        act()
        return update(*args, **kwargs)

    plain.engine.step = first


def optimizer_state(trainer: Trainer) -> list[Any]:
    return [each for state in trainer.optimizer.state.values() for each in state.values()]
