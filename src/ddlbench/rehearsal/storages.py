"""The storages of one fake rank: those that exist at once, and those of parameters, gradients and optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddlbench.job import Trainer


def identity(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage while it exists; the storage of a fake tensor has no address."""
    return tensor.untyped_storage()._cdata  # pyright: ignore


class Alive:
    """Bytes of the tensors that exist at once on a fake device: each storage from its creation to its end.

    bytes_: now; peak: the maximum since it was last set to `bytes_`. They do not contain what the allocator and
    the libraries add: rounding, fragmentation, the device's context, buffers of libraries.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes = dict[int, int]()  # by the storage's identity
        self.bytes_ = self.peak = 0

    def made(self, tensor: Tensor) -> None:
        """Count a tensor that an operation has returned."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]
        if local.device.type != self.device.type:
            return
        storage, key = local.untyped_storage(), identity(local)
        if key not in self.sizes:
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._ended, key)

    @contextmanager
    def watching_resizes(self) -> Generator[None]:
        """Count resized storages: FSDP frees and fills the memory of gathered weights in this way."""
        resize: Any = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            key: int = storage._cdata  # pyright: ignore
            if key in self.sizes:
                self._set(key, storage.nbytes())
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def _set(self, key: int, size: int) -> None:
        self.bytes_ += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.bytes_)

    def _ended(self, key: int) -> None:
        self.bytes_ -= self.sizes.pop(key, 0)


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
