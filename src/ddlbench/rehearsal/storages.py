"""The storages of one fake rank: those of parameters, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ddlbench.job import Trainer
from ddlbench.ranks.fake.storages import identity


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


def parameters(trainer: Any) -> list[Any]:
    """The parameters of this rank's model, and the slices that DeepSpeed's stage 3 keeps beside them."""
    weights: list[Any] = list(trainer.model.parameters())
    return [*weights, *(weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor"))]


def updated(trainer: Any) -> list[Any]:
    """The tensors that the optimizer updates: the model's parameters or copies of them. DeepSpeed's stage 3 gives the
    optimizer its copies only during the update."""
    copies = getattr(trainer.engine.optimizer, "fp32_partitioned_groups_flat", []) if hasattr(trainer, "engine") else []
    return [*(weight for group in trainer.optimizer.param_groups for weight in group["params"]), *copies]


def gradients(trainer: Any) -> list[Any]:
    """The gradients of the parameters, and those that DeepSpeed keeps for its update."""
    averaged = getattr(trainer.engine.optimizer, "averaged_gradients", {}) if hasattr(trainer, "engine") else {}
    kept = [part for parts in averaged.values() if parts is not None for part in parts]
    return [*(weight.grad for weight in (*parameters(trainer), *updated(trainer))), *kept]


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


def memory(trainer: Trainer) -> dict[str, int | None]:
    """Bytes of parameters and optimizer; copies of the weights that the optimizer keeps count as its state, which the
    first update creates. Gradients and peak are not known here."""
    counted = set[int]()
    weights = stored(parameters(trainer), counted)
    state = [value for state in trainer.optimizer.state.values() for value in state.values()]
    optimizer = stored([*updated(trainer), *state], counted) if state else None
    return {"parameters": weights, "gradients": None, "optimizer": optimizer, "peak": None}
