"""Batches without content for a rehearsal, copied from the host to the device as in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from itertools import repeat
from unittest.mock import patch

import torch

from ddlbench.data.images import split
from ddlbench.data.loaders.to_device import ToDevice
from ddlbench.job import Batch, Job, Place


def fed(job: Job, place: Place, pinned: bool | None) -> Iterator[Batch | None]:
    """Endless. pinned: whether a loader leaves batches in pinned memory; None: it leaves them on the device"""
    if not place.reads_data:
        return repeat(None)
    samples = job.replica_batch(place.data_size)
    if pinned is None or job.device.type == "cpu":
        return (batch(job, samples, job.device).to(job.device, job.channels_last) for _ in repeat(None))
    hosts = (batch(job, samples, torch.device("cpu"), pinned) for _ in repeat(None))
    return ToDevice(job.device, job.channels_last)(hosts)


def batch(job: Job, samples: int, device: torch.device, pinned: bool | None = None) -> Batch:
    """Images of the host are bytes where there is a GPU, which normalises them."""
    shape, text, on_host = job.model.input_shape(), job.model.kind == "text", pinned is not None
    kind = torch.int64 if text else torch.uint8 if on_host else torch.float32
    inputs = torch.zeros(samples, *shape, dtype=kind, device=device, pin_memory=bool(pinned))
    labels = torch.zeros(samples, *(shape if text else ()), dtype=torch.int64, device=device, pin_memory=bool(pinned))
    valid = torch.ones(samples, dtype=torch.bool, device=device, pin_memory=bool(pinned))
    return Batch(inputs, labels, valid)


def own_constants() -> AbstractContextManager[object]:
    """A process creates the tensors that normalize images once. Those of a rehearsal are fake and must end with it."""
    return patch.object(split, "mean_and_std", cache(split.mean_and_std.__wrapped__))
