"""What a rank must save between two epochs to continue exactly: the tensors that change.

An optional protocol beside `Trainer` (docs/adr/0019): a trainer without it trains as before, and `checkpoint.every` is
refused for it. A framework that cannot save in every configuration has the method `check_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddlbench.errors import Unsupported
from ddlbench.job import Trainer


@dataclass(frozen=True)
class Live:
    """The tensors of a rank that training changes, in place and not copied, and the optimizer that changes them.

    parameters: what the optimizer updates, by name; a DTensor where ranks have shards of one
    rank_tensors: other tensors, whose values differ between ranks (BatchNorm's statistics), by name
    part: ranks of the same part have equal parameters and optimizer states, or shards of the same: saved once
    """

    parameters: Mapping[str, Tensor]
    optimizer: Optimizer
    rank_tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    part: str = "model"


@runtime_checkable
class Checkpointable(Protocol):
    """A `Trainer` that can be saved between two epochs and restored in another process of the same rank."""

    def live(self) -> Live:
        """Its tensors, the same names in every process."""
        ...

    def numbers(self) -> dict[str, Any]:
        """Its state that is not in tensors: numbers and flags, equal on all ranks."""
        ...

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """The live tensors have been overwritten; take the numbers back. Called on all ranks."""
        ...


OFF = "set checkpoint.every=null"


def checkpointable(framework: str, trainer: Trainer) -> Checkpointable:
    """The trainer as one that can be saved. Unsupported if its framework cannot save what it trains."""
    if not isinstance(trainer, Checkpointable):
        raise Unsupported(f"{framework} does not save checkpoints: {OFF}")
    return trainer


def named_tensors(live: Live, rank: int, device: torch.device) -> dict[str, Tensor]:
    """All that is saved of a rank, in place where it is the model's: parameters, optimizer states, buffers, and the
    states of the random number generators."""
    saved = {f"{live.part}/parameters/{name}": tensor.detach() for name, tensor in live.parameters.items()}
    for name, parameter in live.parameters.items():
        for key, value in live.optimizer.state.get(parameter, {}).items():
            if value is not None:
                saved[f"{live.part}/optimizer/{name}/{key}"] = value
    for index, group in enumerate(live.optimizer.param_groups):
        if "step" in group:  # timm's LAMB counts the updates here, and not in the states of its parameters
            group["step"] = torch.as_tensor(group["step"])  # an int in older versions
            saved[f"{live.part}/groups/{index}/step"] = group["step"]
    saved |= {f"rank{rank}/own/{name}": tensor for name, tensor in live.rank_tensors.items()}
    saved[f"rank{rank}/random/cpu"] = torch.get_rng_state()  # of torch's generators: a step draws from no other
    if device.type == "cuda":
        saved[f"rank{rank}/random/cuda"] = torch.cuda.get_rng_state(device)
    return saved


def make_optimizer_states(live: Live, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    """Give the optimizer of a new process the states that a saved one had, still without their values.

    shapes: of every saved tensor, by its name
    """
    groups = live.optimizer.param_groups  # not the defaults, which Horovod's optimizer takes from the class
    on_device = any(group.get(name) for group in groups for name in ("capturable", "fused"))
    for index, group in enumerate(groups):
        if saved_step := shapes.get(f"{live.part}/groups/{index}/step"):
            shape, dtype = saved_step
            group["step"] = torch.zeros(shape, dtype=dtype)
    new_state = getattr(live.optimizer, "new_state", None)  # of an optimizer whose states have shapes of their own
    for name, parameter in live.parameters.items():
        prefix = f"{live.part}/optimizer/{name}/"
        saved = {key.removeprefix(prefix): kind for key, kind in shapes.items() if key.startswith(prefix)}
        if new_state and saved:
            live.optimizer.state[parameter] = new_state(parameter)
            continue
        for key, (shape, dtype) in saved.items():
            if shape == parameter.shape:
                state = torch.zeros_like(parameter.detach(), dtype=dtype)
            else:  # torch keeps the number of steps on the CPU
                state = torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
            live.optimizer.state[parameter][key] = state


def set_random_states(saved: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """saved: the tensors that `named_tensors` named"""
    torch.set_rng_state(saved[f"rank{rank}/random/cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(saved[f"rank{rank}/random/cuda"], device)
