"""What one fake rank does in a step (collectives, and calls in which the host waits for its device), and what it holds:
the storages of parameters, gradients and optimizer."""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.job import Trainer
from ddlbench.measure.formulas.flops import operation_flops
from ddlbench.ranks.fake import cuda as fake_cuda
from ddlbench.ranks.fake.cuda import BACKWARD, leave
from ddlbench.ranks.fake.storages import Alive, identity, tensors, unknown

# Methods that do not reach the dispatcher if nothing has to be copied.
METHODS = {Tensor.cpu: "cpu", Tensor.tolist: "tolist", Tensor.numpy: "numpy"}
# Operations whose result the host needs: a number, or the shape of what they return.
WAITS = {
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
    "aten::equal": "equal",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::bincount": "bincount",
    "aten::repeat_interleave": "repeat_interleave",
}
COPIES = ("aten::_to_copy", "aten::copy_")
TO_HOST, UNPINNED = "copy to the host", "copy from memory that is not pinned"
BLOCKING = "copy from pinned memory without non_blocking"
OVERFLOW = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
# Frames between a call and the line that asks for it.
BETWEEN = ("torch/utils/", "torch/_subclasses/", "torch/_dynamo/", "torch/_compile.py", "torch/_ops.py",
           "torch/_tensor.py", "torch/overrides.py", "torch/_library/", "torch/library.py", "contextlib.py",
           "ddlbench/ranks/fake/", "ddlbench/rehearsal/")  # fmt: skip
OUTERMOST = "rehearsal/rehearse.py"
PACKAGE = f"{Path(__file__).parents[1]}/"  # not any folder with its name: a clone has its libraries in ddlbench/.venv


class Group(NamedTuple):
    """Collectives of one kind in groups of `ranks` ranks with distance `stride`."""

    kind: str
    ranks: int
    stride: int


class Operation(NamedTuple):
    """One call of torch's dispatcher.

    flops: of a matrix product, a convolution or attention (measure/formulas/flops.py); else 0
    bytes_: of the results; of a collective: of the complete message, which all ranks of a group start from or end with
    peer: the rank that gets or sends a message between two ranks
    """

    name: str
    flops: float
    bytes_: int
    group: Group | None = None
    peer: int | None = None


class Observed(TorchDispatchMode):
    """What happens since `clear`.

    operations: in their order, without views
    waits: calls in which the host waits, by call and line: of tensors on the device if it is "cuda"; of all tensors on
        the CPU, where it is not known which of them would stay on the host
    pinned: pinned storages by their identity, kept by `clear`

    A number that depends on fake data is unknown: the step reads 1 and continues. No gradient overflows, so every
    update is made: torch's test for an overflow leaves 0, and other questions about data have the answer no.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.operations = list[Operation]()
        self.waits = Counter[tuple[str, str]]()
        self.pinned, self.overflows = dict[int, object](), dict[int, object]()
        self.alive = Alive(device)

    def clear(self) -> None:
        self.operations.clear()
        self.waits.clear()
        self.alive.peak = self.alive.bytes_

    @contextmanager
    def observing(self) -> Generator[None]:
        """Count operations, and the calls that do not reach the dispatcher."""
        fake_cuda.waits.append(self.note_wait)
        try:
            with self, _Methods(self), self.alive.watching_resizes():
                yield
        finally:
            fake_cuda.waits.remove(self.note_wait)

    def note_wait(self, call: str) -> None:
        self.waits[call, where()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operation comes again with the local tensors and its collectives
        kwargs = kwargs or {}
        kind = collective(func)
        if kind is None and (call := needed_by_host(func, args)) and args[0].device.type == self.device.type:
            self.note_wait(call)
        try:
            out = func(*args, **kwargs)
        except DataDependentOutputException:  # a number that depends on data
            if func is torch.ops.aten.equal.default:
                out = True
            elif func is torch.ops.aten._local_scalar_dense.default:
                out = 0.0 if identity(args[0]) in self.overflows else unknown(args[0].dtype)
            else:
                raise
        if kind is not None:
            self.operations.append(communication(kind, func, args, out))
        elif not func.is_view:
            flops, bytes_ = operation_flops(func, args, kwargs, out), sum(tensor.nbytes for tensor in tensors(out))
            self.operations.append(Operation(str(func), flops, bytes_))
        for tensor in tensors(out):
            self.alive.made(tensor)
        if kwargs.get("pin_memory") or func._schema.name == "aten::_pin_memory":
            self.pinned |= {identity(tensor): tensor for tensor in tensors(out)}
        if self.device.type == "cuda" and func._schema.name in COPIES and (copy := self._copy(func, args, kwargs, out)):
            self.note_wait(copy)
        if func is OVERFLOW:
            self.overflows[identity(args[1])] = args[1]
        return out

    def _copy(self, func: Any, args: Any, kwargs: Any, out: Any) -> str | None:
        """Why the host waits for a copy between host and device; None if it does not wait."""
        inplace = func._schema.name == "aten::copy_"
        source, blocks = args[1] if inplace else args[0], not (kwargs.get("non_blocking") or args[2:] == (True,))
        if out.device.type == "cpu" and source.device.type == "cuda":
            return TO_HOST if blocks or identity(out) not in self.pinned else None
        if out.device.type == "cuda" and source.device.type == "cpu":
            return UNPINNED if identity(source) not in self.pinned else BLOCKING if blocks else None
        return None


class _Methods(TorchFunctionMode):
    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self.observed = observed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BACKWARD:
            return leave(self, func, args, kwargs or {})
        kind = self.observed.device.type
        dispatched = func is Tensor.cpu and kind == "cuda"
        if func in METHODS and not dispatched and args[0].device.type == kind:
            self.observed.note_wait(METHODS[func])
        return func(*args, **(kwargs or {}))


def collective(func: Any) -> str | None:
    """The kind of a collective; None for any other operation.

    torch's names are allreduce_, _allgather_base_, reduce_scatter_tensor.
    """
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2].strip("_")
    kinds = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    plain = name.replace("_", "")
    return None if name == "wait_tensor" else next((kinds[key] for key in kinds if plain.startswith(key)), name)


def communication(kind: str, func: Any, args: Sequence[Any], out: Any) -> Operation:
    """The operation of a collective, or of a message between two ranks. kind: as `collective` names it; out: its
    result, which alone has the complete message of a functional all-gather"""
    boxed = next((argument for argument in args if isinstance(argument, torch.ScriptObject)), None)
    if boxed is None:  # the functional collectives take the group's name, last
        process_group = dist.distributed_c10d._resolve_process_group(args[-1])  # pyright: ignore
    else:
        process_group = dist.ProcessGroup.unbox(boxed)
    ranks = dist.get_process_group_ranks(process_group)
    group = Group(kind, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
    bytes_ = max(sum(tensor.nbytes for tensor in tensors(argument)) for argument in (*args, out))
    return Operation(str(func), 0.0, bytes_, group, ranks[args[2]] if kind in ("send", "recv") else None)


def needed_by_host(func: Any, args: Any) -> str | None:
    """The name of a call whose result the host needs; None for any other operation."""
    name = func._schema.name
    by_booleans = name == "aten::index" and any(index is not None and index.dtype == torch.bool for index in args[1])
    return "nonzero" if by_booleans else WAITS.get(name)


def where() -> str:
    """File and line of ddlbench that made a call, with the line of the library if a library made it for ddlbench."""
    frame, first = inspect.currentframe(), None
    while frame is not None and not (file := frame.f_code.co_filename).endswith(OUTERMOST):
        if not any(part in file for part in BETWEEN):
            place = f"{short(file)}:{frame.f_lineno}"
            if file.startswith(PACKAGE):
                return place if first is None else f"{place} ({first})"
            first = first or place
        frame = frame.f_back
    return first or "unknown"


def raised_at(error: Exception) -> str:
    """The last line of ddlbench on the way to an error, as " at FILE:LINE"; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(PACKAGE) and not any(part in frame.filename for part in BETWEEN):
            return f" at {short(frame.filename)}:{frame.lineno}"
    return ""


def short(file: str) -> str:
    """The part of a path from the package on."""
    for folder in ("/site-packages/", "/src/"):
        if folder in file:
            return file.rpartition(folder)[2]
    return Path(file).name


def stored(tensors: Iterable[Any], counted: set[int]) -> int:
    """Bytes of the complete storages of tensors, each once; of a DTensor the storage of this rank. Storages that are in
    `counted` are left out, and the others are added to it."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, Tensor) and identity(local) not in counted:
            counted.add(identity(local))
            total += local.untyped_storage().nbytes()
    return total


def held(trainer: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The parameters of this rank's model; the tensors that the optimizer updates, which are parameters or copies of
    them; the gradients of both. DeepSpeed also keeps gradients for its update, and its stage 3 slices of the parameters
    and copies that the optimizer has only during the update."""
    parameters: list[Any] = list(trainer.model.parameters())
    parameters += [weight.ds_tensor for weight in parameters if hasattr(weight, "ds_tensor")]
    updated: list[Any] = [weight for group in trainer.optimizer.param_groups for weight in group["params"]]
    kept: list[Any] = []
    if hasattr(trainer, "engine"):
        optimizer = trainer.engine.optimizer
        updated += getattr(optimizer, "fp32_partitioned_groups_flat", [])
        averaged = getattr(optimizer, "averaged_gradients", {}).values()
        kept += [part for parts in averaged if parts is not None for part in parts]
    return parameters, updated, [*(weight.grad for weight in (*parameters, *updated)), *kept]


def before_update(trainer: Any, act: Callable[[], None]) -> None:
    """Call `act` before each update, when the gradients are complete. DeepSpeed copies and drops gradients before its
    optimizer begins."""
    if not hasattr(trainer, "engine"):
        trainer.optimizer.register_step_pre_hook(lambda *_: act())
        return
    update = trainer.engine.step

    def first(*args: Any, **kwargs: Any) -> Any:
        act()
        return update(*args, **kwargs)

    trainer.engine.step = first


def memory(trainer: Trainer, gradient_bytes: Sequence[int], peak: int) -> dict[str, int | None]:
    """Bytes of parameters, gradients and optimizer. Its state, which the first update creates, includes its copies of
    weights. gradient_bytes: before each update"""
    counted = set[int]()
    parameters, updated, _ = held(trainer)
    weights = stored(parameters, counted)
    state = [value for state in trainer.optimizer.state.values() for value in state.values()]
    optimizer = stored([*updated, *state], counted) if gradient_bytes else None
    return {"parameters": weights, "gradients": max(gradient_bytes, default=None), "optimizer": optimizer, "peak": peak}
