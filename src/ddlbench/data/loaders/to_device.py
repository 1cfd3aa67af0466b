"""Batches from a loader to the device of this rank: copied one batch ahead on CUDA, and images normalized there.

On the CPU nothing is copied, and the native loader has normalized images already, in its workers. On CUDA images
arrive as uint8, a quarter of the bytes, and two streams share the work:

    side stream:     copy 0 | copy 1 | copy 2 ...
    compute stream:  wait for copy 0, normalize 0, step 0 | wait for copy 1, normalize 1, step 1 | ...

The host starts the copy of batch n + 1 before it returns batch n, so that the copy runs while the device computes on
batch n. The time that the compute stream waits for its batch is the data wait of measure/clock.py. An epoch requests
the first batch from its loader when its own first batch is requested: no batch is fetched before its clock runs.

Memory of the device: a copy belongs to the side stream; `record_stream` keeps its memory from later copies until the
compute stream has done with it. Memory of the host: torch's allocator of pinned memory notes the stream of each copy,
and reuses the memory after the copy; of other memory CUDA takes what it copies before the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import torch

from ddlbench.data.images.split import normalize
from ddlbench.job import Batch

Sent: TypeAlias = tuple[Batch, bool, torch.cuda.Event]  # on the device, whether all samples are valid, end of the copy


class ToDevice:
    """One for all epochs of a feed: its side stream stays the same."""

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
            batch, full, copied = coming
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(copied)
            for part in (batch.inputs, batch.targets, batch.valid):
                part.record_stream(compute)
            ready = self._ready(batch, full)
            coming = self._send(batches, self._side)
            yield ready

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
