"""A replica's samples of each epoch. Every loader of real samples uses this; only reading and decoding differ."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, Protocol

from torch.nn import functional as F

from ddlbench.data.feed import Fetched, Loader, Request, Split
from ddlbench.data.loaders.to_device import ToDevice
from ddlbench.data.sampler import Indices, epoch_order, training_batches, training_steps, validation_batches
from ddlbench.job import Batch

log = logging.getLogger(__name__)


class SplitReader(Protocol):
    """Reads the batches of one split in advance."""

    @property
    def split(self) -> Split: ...

    def read(self, epoch: int, batches: Iterable[Indices]) -> Iterator[Fetched]:
        """The batches in their order; for an empty batch, no samples of the right shape. Random numbers depend on the
        seed and the epoch alone."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


class ReplicaFeed:
    """loader: with its settings, which are facts for the record."""

    def __init__(self, train: SplitReader, validation: SplitReader, request: Request, loader: Loader) -> None:
        samples = len(train.split)
        self.steps_per_epoch = training_steps(samples, request.global_batch, request.steps)
        self.dropped_samples = samples % request.global_batch
        self.val_samples = len(validation.split)
        self.val_unread = 0
        self._train, self._validation, self._request, self._loader = train, validation, request, loader
        self._to_device = ToDevice(request.device, request.channels_last)
        self._bad: Counter[str] = Counter()

    def train(self, epoch: int) -> Iterator[Batch | None]:
        place, size = self._request.place, self._request.replica_batch
        if not place.reads_data:
            return repeat(None, self.steps_per_epoch)
        order = epoch_order(len(self._train.split), self._request.seed, epoch)
        batches = training_batches(order, size, place.data_rank, place.data_size)
        return self._to_device(self._read(self._train, epoch, batches[: self.steps_per_epoch]))

    def validation(self) -> Iterator[Batch | None]:
        place, size = self._request.place, self._request.replica_batch
        batches = validation_batches(self.val_samples, size, place.data_rank, place.data_size)
        self.val_unread = 0
        if not place.reads_data:
            return repeat(None, len(batches))
        return self._to_device(self._read(self._validation, 0, batches))

    def facts(self) -> dict[str, Any]:
        """cores: that each rank has to itself; ahead: as Loader.ahead
        bad_samples: name of each sample that could not be read -> how often this rank met it"""
        settings = {key: value for key, value in vars(self._loader).items() if key != "name"}
        return {**settings, "ahead": self._loader.ahead, "cores": self._request.cores, "bad_samples": dict(self._bad)}

    def close(self) -> None:
        self._train.close()
        self._validation.close()

    def _read(self, reader: SplitReader, epoch: int, batches: Iterable[Indices]) -> Iterator[Batch]:
        """Batches of equal size: missing samples are zeros and not valid."""
        for fetched in reader.read(epoch, batches):
            for name in fetched.bad:
                if name not in self._bad:
                    log.warning("bad sample: %s cannot be decoded", name)
                self._bad[name] += 1
            self.val_unread += len(fetched.bad) if reader is self._validation else 0
            parts = (fetched.inputs, fetched.targets, fetched.valid)
            if missing := self._request.replica_batch - len(fetched.valid):
                parts = (F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in parts)
            yield Batch(*parts)
