"""Overlap of communication and computing: small simulations of a device that computes and a link that sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MiB = 2**20
FIRST_BUCKET, BUCKET = MiB, 25 * MiB  # torch.nn.parallel.DistributedDataParallel


@dataclass(frozen=True)
class Gradient:
    """The bytes of a gradient or a message, and when it is ready, in seconds after the start of the backward pass."""

    size: float
    ready: float


def buckets(
    sizes: Sequence[Sequence[float]], backward: Sequence[float], first: float = FIRST_BUCKET, cap: float = BUCKET
) -> list[Gradient]:
    """DDP's buckets: gradients in the order of the backward pass fill a bucket until it has `cap` bytes or more. Those
    of a block are ready at the end of its backward pass.

    sizes: bytes of the tensors of each block; backward: seconds of each block; first: cap of the first bucket
    """
    filled: list[Gradient] = []
    size, limit, now, last = 0.0, first, 0.0, 0.0
    for block, seconds in zip(reversed(sizes), reversed(backward), strict=True):
        now += seconds
        for tensor in reversed(block):
            size, last = size + tensor, now
            if size >= limit:
                filled.append(Gradient(size, now))
                size, limit = 0.0, cap
    return [*filled, Gradient(size, last)] if size else filled


def queue(messages: Iterable[Gradient], seconds: Callable[[float], float]) -> float:
    """The time when the last message has arrived. Messages are sent one after the other, none before it is ready."""
    free = 0.0
    for message in messages:
        free = max(free, message.ready) + seconds(message.size)
    return free


@dataclass(frozen=True)
class Sharded:
    """Seconds of one block whose weights are in shards: it is gathered before each pass and reduced after the backward
    pass (0: it is not)."""

    forward: float
    backward: float
    gather: float
    gather_again: float
    reduce: float

    @property
    def sent(self) -> tuple[float, float, float]:
        return self.gather, self.gather_again, self.reduce


def sharded_step(blocks: Sequence[Sharded]) -> float:
    """Seconds of a micro batch. Each block is gathered while the previous one computes (FSDP's prefetch), and its
    gradients are reduced while the next one computes. Gathers and reductions share one link."""
    link, begun, done = 0.0, 0.0, 0.0
    for block in blocks:
        link = max(link, begun) + block.gather
        begun = max(done, link) if block.gather else done
        done = begun + block.forward
    pending, begun, link = 0.0, done, max(link, done)
    for block in reversed(blocks):
        if block.gather_again:
            link = max(link, begun) + block.gather_again
        if pending:  # the reduction of the block before begins after this gather
            link = max(link, done) + pending
        begun = max(done, link - pending) if block.gather_again else done
        done = begun + block.backward
        pending = block.reduce
    return max(done, max(link, done) + pending if pending else link)
