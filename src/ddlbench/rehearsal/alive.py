"""How many bytes of tensors live at once on a fake device: storages from the operation that makes them to their end."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Alive:
    """bytes_: now; peak: the most since it was last set to `bytes_`. What the allocator adds is not in it: blocks of
    powers of two, fragments, the device's context, libraries' own buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes = dict[int, int]()  # by the storage's identity
        self.bytes_ = self.peak = 0

    def made(self, tensor: Tensor) -> None:
        """An operation returned it."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]
        if local.device.type != self.device.type:
            return
        storage = local.untyped_storage()
        key = identity(storage)
        if key not in self.sizes:
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._ended, key)

    @contextmanager
    def watching_resizes(self) -> Generator[None]:
        """FSDP frees and fills the memory of whole weights so."""
        resize: Any = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            key = identity(storage)
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


def identity(storage: torch.UntypedStorage) -> int:
    """As long as it lives; that of a fake tensor has no address."""
    return storage._cdata  # pyright: ignore
