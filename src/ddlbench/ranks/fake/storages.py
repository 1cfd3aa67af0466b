"""Fake tensors and their storages: their sizes, and the bytes that exist at the same time."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


def tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def unknown(dtype: torch.dtype) -> float | int | bool:
    """The number 1 in Python's type for `dtype`; False or 0 for a bool or a byte, with which DeepSpeed asks whether a
    gradient overflows, and FSDP's scaler whether its scale grows."""
    if dtype in (torch.bool, torch.uint8):
        return False if dtype == torch.bool else 0
    return 1.0 if dtype.is_floating_point else 1


def identity(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage while it exists; the storage of a fake tensor has no address."""
    return tensor.untyped_storage()._cdata  # pyright: ignore


class Alive:
    """Bytes of the tensors that exist at the same time on a fake device: each storage from its creation to its end.

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
