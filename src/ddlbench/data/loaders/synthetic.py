"""Batches without input cost: made once on the device and yielded again. The upper bound of every loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any, ClassVar

import torch

from ddlbench.data.feed import Dataset, Loader, Request
from ddlbench.data.loaders.replica_feed import training_steps, validation_batches
from ddlbench.errors import check_values
from ddlbench.job import Batch


@dataclass
class Synthetic(Loader):
    """Replaces every data set: gives as many samples and steps as the data set, all of them random numbers.

    train_samples, val_samples: number of samples; None: as in the data set
    """

    scored: ClassVar[bool] = False  # random numbers, in validation those of training: nothing is learned from them
    counts_reads: ClassVar[bool] = False  # it reads nothing; what the measurement reads would look like data

    name: str
    train_samples: int | None = None
    val_samples: int | None = None

    def __post_init__(self) -> None:
        check_values("loader.", self, least={"train_samples": 1, "val_samples": 0})

    def open(self, dataset: Dataset, request: Request) -> SyntheticFeed:
        train, val = (
            len(dataset.split(train, request.model, request.seed)) if samples is None else samples
            for train, samples in ((True, self.train_samples), (False, self.val_samples))
        )
        return SyntheticFeed(train, val, request)


class SyntheticFeed:
    def __init__(self, train_samples: int, val_samples: int, request: Request) -> None:
        self.steps_per_epoch = training_steps(train_samples, request.global_batch, request.steps)
        self.dropped_samples = train_samples % request.global_batch
        self.val_samples = val_samples
        self.val_unread = 0
        self._request = request
        self._random = cache(partial(random_batch, request))  # each batch is made at its first use

    def train(self, epoch: int) -> Iterator[Batch | None]:
        request = self._request
        batch = self._random(request.replica_batch) if request.place.reads_data else None
        return repeat(batch, self.steps_per_epoch)

    def validation(self) -> Iterator[Batch | None]:
        place, size = self._request.place, self._request.replica_batch
        batches = validation_batches(self.val_samples, size, place.data_rank, place.data_size)
        return iter([self._random(len(batch)) if place.reads_data else None for batch in batches])

    def facts(self) -> dict[str, Any]:
        return {"bad_samples": {}}

    def close(self) -> None:
        self._random.cache_clear()


def random_batch(request: Request, valid: int) -> Batch:
    """Standard normal images and random classes, or random tokens and their successors; by seed and data rank. A full
    batch of which the first `valid` samples count."""
    model, size = request.model, request.replica_batch
    random = torch.Generator().manual_seed(request.seed * request.place.data_size + request.place.data_rank)
    if model.kind == "images":
        inputs = torch.randn(size, *model.input_shape(), generator=random)
        targets = torch.randint(model.outputs(), (size,), generator=random)
    else:
        (length,) = model.input_shape()
        text = torch.randint(model.outputs(), (size, length + 1), generator=random)
        inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Batch(inputs, targets, torch.arange(size) < valid).to(request.device, request.channels_last)
