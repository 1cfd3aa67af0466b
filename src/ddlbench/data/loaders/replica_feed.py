"""A replica's samples of each epoch, on its device. Every loader of real samples uses this; only reading and decoding
differ. Which samples a replica sees, and when, follows from (seed, epoch, data rank): no layout changes a sample."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import repeat
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ddlbench.data.feed import Fetched, Loader, Request, Split
from ddlbench.data.images.folders import batch_memory
from ddlbench.errors import UserError
from ddlbench.job import Batch
from ddlbench.texts import printable

log = logging.getLogger(__name__)

Indices = NDArray[np.int64]
Sent: TypeAlias = tuple[Batch, bool, torch.cuda.Event]  # on the device, whether all samples are valid, end of the copy
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images, channels R, G, B


def epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """The epoch's permutation of all training samples, [samples]. RandomState: its stream never changes with numpy."""
    return np.random.RandomState([seed % 2**32, seed >> 32, epoch]).permutation(samples).astype(np.int64, copy=False)


def training_steps(samples: int, global_batch: int, cap: int | None = None) -> int:
    """Full global batches in an epoch, at most `cap`; the incomplete last one is dropped. Raises UserError where the
    samples do not fill a single global batch."""
    full = samples // global_batch
    if not full:
        raise UserError(
            f"the data has {samples} training samples, fewer than one global batch of {global_batch}: "
            f"lower train.global_batch (or train.batch_per_gpu), or choose a larger data set"
        )
    return full if cap is None else min(full, cap)


def validation_batches(samples: int, replica_batch: int, data_rank: int, data_size: int) -> list[Indices]:
    """This replica's strided shard in batches of at most `replica_batch`, without padding.

    Every sample is in exactly one shard. The number of batches is the same on every replica, so the last may be
    short, or empty where the shard is one batch shorter than the longest.
    """
    shard = np.arange(data_rank, samples, data_size, dtype=np.int64)
    count = -(-samples // (replica_batch * data_size))
    return [shard[i * replica_batch : (i + 1) * replica_batch] for i in range(count)]


class SplitReader(Protocol):
    """Reads the batches of one split in advance."""

    @property
    def split(self) -> Split: ...

    def read(self, epoch: int, batches: Iterable[Indices]) -> Iterator[Fetched]:
        """The batches in order, an empty one with the right shape. Random numbers depend on seed and epoch alone. The
        call itself is outside of the epoch's time: no sample is read before the first batch is asked for."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""


class ReplicaFeed:
    """loader: with its settings, which are facts for the record
    ahead: batches of an epoch that may be ready, or begun, before a step asks for them
    """

    def __init__(
        self, train: SplitReader, validation: SplitReader, request: Request, loader: Loader, ahead: int = 0
    ) -> None:
        samples = len(train.split)
        self.steps_per_epoch = training_steps(samples, request.global_batch, request.steps)
        self.dropped_samples = samples % request.global_batch
        self.val_samples = len(validation.split)
        self.val_unread = 0
        self._train, self._validation, self._request = train, validation, request
        self._loader, self._ahead = loader, ahead
        self._to_device = ToDevice(request.device, request.channels_last)
        self._bad: Counter[str] = Counter()

    def train(self, epoch: int) -> Iterator[Batch | None]:
        place, size = self._request.place, self._request.replica_batch
        if not place.reads_data:
            return repeat(None, self.steps_per_epoch)
        # A global batch is a contiguous cut of the epoch's order, and data rank r takes the r-th slice of it.
        order = epoch_order(len(self._train.split), self._request.seed, epoch)
        read = order[: self.steps_per_epoch * self._request.global_batch]
        batches = read.reshape(self.steps_per_epoch, place.data_size, size)[:, place.data_rank]
        return self._to_device(self._filled(self._train.read(epoch, batches)))

    def validation(self) -> Iterator[Batch | None]:
        place, size = self._request.place, self._request.replica_batch
        batches = validation_batches(self.val_samples, size, place.data_rank, place.data_size)
        self.val_unread = 0
        if not place.reads_data:
            return repeat(None, len(batches))
        return self._to_device(self._filled(self._validation.read(0, batches), validation=True))

    def facts(self) -> dict[str, Any]:
        """cores: of each rank; bad_samples: name of each sample that could not be read -> how often this rank met it"""
        settings = {key: value for key, value in vars(self._loader).items() if key != "name"}
        return {**settings, "ahead": self._ahead, "cores": self._request.cores, "bad_samples": dict(self._bad)}

    def close(self) -> None:
        self._train.close()
        self._validation.close()

    def _filled(self, batches: Iterator[Fetched], validation: bool = False) -> Iterator[Batch]:
        """Batches of equal size: missing samples are zeros and not valid."""
        for fetched in batches:
            for name in fetched.bad:
                if name not in self._bad:
                    log.warning("bad sample: %s cannot be decoded", printable(name))
                self._bad[name] += 1
            self.val_unread += len(fetched.bad) if validation else 0
            parts = (fetched.inputs, fetched.targets, fetched.valid)
            if missing := self._request.replica_batch - len(fetched.valid):
                parts = (F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in parts)
            yield Batch(*parts)


class ToDevice:
    """Batches from a loader to the device of this rank: copied one batch ahead on CUDA, and images normalized there.
    One for all epochs of a feed: its side stream stays the same.

    On the CPU nothing is copied, and the native loader has normalized images already, in its workers. On CUDA images
    arrive as uint8, a quarter of the bytes, and two streams share the work:

        side stream:     copy 0 | copy 1 | copy 2 ...
        compute stream:  wait for copy 0, normalize 0, step 0 | wait for copy 1, normalize 1, step 1 | ...

    The host starts the copy of batch n + 1 before it returns batch n, so that the copy runs while the device computes
    on batch n. The time that the compute stream waits for its batch is the data wait of measure/clock.py. An epoch
    requests the first batch from its loader when its own first batch is requested: no batch is fetched before its
    clock runs.

    Memory of the device: a copy belongs to the side stream; `record_stream` keeps its memory from later copies until
    the compute stream has done with it. Memory of the host: torch's allocator of pinned memory notes the stream of each
    copy, and reuses the memory after the copy; of other memory CUDA takes what it copies before the call returns.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self.device = device
        self._channels_last = channels_last
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of one epoch, in their order, images as float32."""
        if self._side is None:
            yield from (self._ready(batch, bool(batch.valid.all())) for batch in batches)
            return
        coming = self._send(batches, self._side)
        while coming is not None:
            (batch, full, copied), coming = coming, None
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(copied)
            for part in (batch.inputs, batch.targets, batch.valid):
                part.record_stream(compute)
            batch = self._ready(batch, full)  # what was sent is free when the next copy begins
            coming = self._send(batches, self._side)
            yield batch

    def _send(self, batches: Iterator[Batch], side: torch.cuda.Stream) -> Sent | None:
        """Fetch the next batch and queue its copy. Loaders that deliver on the device (DALI) order their work with the
        stream that is current here."""
        with torch.cuda.stream(side):
            batch = next(batches, None)
            if batch is None:
                return None
            sent, copied = batch.to(self.device), torch.cuda.Event()
            copied.record(side)
            return sent, bool(batch.valid.all()), copied

    def _ready(self, batch: Batch, full: bool) -> Batch:
        """With images normalized and in their layout. full: whether all samples are valid; the others become zeros."""
        images = batch.inputs
        if images.dim() != 4:  # tokens
            return batch
        layout = torch.channels_last if self._channels_last else torch.preserve_format
        if images.dtype != torch.uint8:
            return replace(batch, inputs=images.to(memory_format=layout))
        normal = normalize(images, torch.empty_like(images, dtype=torch.float32, memory_format=layout))
        if not full:
            normal.masked_fill_(~batch.valid.view(-1, 1, 1, 1), 0)
        return replace(batch, inputs=normal)


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
