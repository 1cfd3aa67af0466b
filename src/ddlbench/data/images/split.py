"""Images of one split by random access: read, decoded, and augmented by (seed, epoch, index) alone."""

from __future__ import annotations

import hashlib
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from ddlbench.data.feed import Fetched
from ddlbench.data.images.decoding import BadImage, decode_image
from ddlbench.data.images.index import Files
from ddlbench.data.staging import StagedFiles
from ddlbench.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images, channels R, G, B


@dataclass(frozen=True)
class Source(ABC):
    """The images of one split by their position in the order of classes and names; picklable.

    where: their folder; original: the user's folder, where `where` is this node's copy of it
    """

    where: Path
    classes: tuple[str, ...]
    files: Files
    original: Path | None = field(default=None, kw_only=True)

    def within(self, i: int) -> str:
        """<class>/<file>"""
        return f"{self.classes[self.files.labels[i]]}/{self.files.name(i)}"

    def name(self, i: int) -> str:
        """For the record."""
        return f"{self.where.name}/{self.within(i)}"

    @abstractmethod
    def content(self, i: int) -> bytes | memoryview:
        """An image as its file has it. Raises UserError where it cannot be read."""

    @abstractmethod
    def place(self, i: int) -> str:
        """For error messages: where the user has the image."""

    @abstractmethod
    def files_to_stage(self) -> StagedFiles:
        """All files of the split, to be copied from `original` to `where`."""


@dataclass(frozen=True)
class ImageSplit:
    """Images as [B, 3, H, W] uint8, read and augmented one by one.

    chosen: the images that count as samples, in their order; size: (H, W)
    transform: of a decoded image to its pixels [3, H, W] uint8
    """

    source: Source
    chosen: NDArray[np.int64]
    size: tuple[int, int]
    train: bool
    seed: int
    decode: str
    skip: bool
    transform: Callable[[Any], Tensor]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Fetched:
        """Raises UserError for a file that cannot be read, and for one that cannot be decoded unless `skip`."""
        bad: list[str] = []
        inputs = batch_memory(torch.uint8, len(keys), 3, *self.size)
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            samples = [self._sample(*key, image, bad) for key, image in zip(keys, inputs, strict=True)]
        labels, valid = zip(*samples, strict=True)
        return Fetched(inputs, torch.tensor(labels), torch.tensor(valid), tuple(bad))

    def _sample(self, epoch: int, index: int, out: Tensor, bad: list[str]) -> tuple[int, bool]:
        """Label, validity; the image goes to `out`. Bad files are added to `bad`; in training the next good one
        replaces it."""
        for offset in range(len(self) if self.train else 1):
            position = (index + offset) % len(self)
            image = int(self.chosen[position])
            if self.train:
                torch.default_generator.manual_seed(augmentation_seed(self.seed, epoch, position))
            try:
                out.copy_(self.transform(decode_image(self.source.content(image), self.decode)))
            except BadImage as error:
                if not self.skip:
                    raise UserError(
                        f"{self.source.place(image)} cannot be decoded ({error}): replace or remove the file, "
                        f"or leave such samples out with data.on_bad_sample=skip"
                    ) from error
                bad.append(self.source.name(image))
            else:
                return self.label(position), True
        if self.train:
            raise UserError(
                f"none of the {len(bad)} images tried in {self.source.where} could be decoded: check the data set"
            )
        out.zero_()
        return 0, False

    def label(self, position: int) -> int:
        return int(self.source.files.labels[self.chosen[position]])


def batch_memory(dtype: torch.dtype, *shape: int) -> Tensor:
    """Memory without values, in a worker shared with the rank, as in torch's own collation: no batch is copied."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.UntypedStorage._new_shared(size)  # pyright: ignore[reportPrivateUsage]
    return torch.empty(0, dtype=dtype).set_(memory, 0, shape)  # pyright: ignore[reportCallIssue]  # torch's own storage


def normalized(fetched: Fetched) -> Tensor:
    """Images [B, 3, H, W] as float32, image by image while it is in the core's cache; zeros where one is not valid."""
    batch = batch_memory(torch.float32, *fetched.inputs.shape)
    for pixels, out, valid in zip(fetched.inputs, batch, fetched.valid.tolist(), strict=True):
        if valid:
            normalize(pixels, out)
        else:
            out.zero_()
    return batch


def normalize(pixels: Tensor, out: Tensor) -> Tensor:
    """torchvision's ToDtype(scale=True) and Normalize, operation by operation, of images [..., 3, H, W] uint8 to `out`
    on the same device: the same bits on the CPU and on CUDA, alone or in a batch."""
    mean, std = mean_and_std(out.device)
    return out.copy_(pixels).mul_(1 / 255).sub_(mean).div_(std)


@cache
def mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    """[3, 1, 1] each, made once a device: to copy them to CUDA the host has to wait."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return mean, std


def augmentation_seed(seed: int, epoch: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(struct.pack("<3q", seed, epoch, index), digest_size=8).digest(), "little")
