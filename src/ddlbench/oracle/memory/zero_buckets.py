"""DeepSpeed's buckets: the bytes that live while gradients arrive, parameter by parameter (stage_1_and_2 and
stage3 of deepspeed.runtime.zero).

A gradient is copied into the bucket and freed; one larger than the bucket stays where it is until it is reduced. To be
reduced, what a bucket holds is copied to one piece, unless it is one piece already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlbench.oracle.counts.counts import Block


@dataclass(frozen=True)
class Shards:
    """Parameters laid end to end and cut into equal partitions, one a rank. ends: where each parameter ends"""

    ends: tuple[int, ...]
    ranks: int

    @classmethod
    def of(cls, blocks: Sequence[Block], ranks: int) -> Shards:
        ends, end = list[int](), 0
        for block in blocks:
            for number in block.parameters:
                end += number
                ends.append(end)
        return cls(tuple(ends), ranks)

    @property
    def size(self) -> int:
        return ceil(self.ends[-1] / self.ranks)

    def numbers(self, which: int) -> int:
        return self.ends[which] - (self.ends[which - 1] if which else 0)

    def slices(self, which: int) -> list[tuple[int, int]]:
        """Rank and numbers of each part of a parameter."""
        start, end = self.ends[which] - self.numbers(which), self.ends[which]
        first, last = start // self.size, max(start, end - 1) // self.size
        edges = [start, *((rank + 1) * self.size for rank in range(first, last)), end]
        return [(first + index, after - before) for index, (before, after) in enumerate(pairwise(edges))]

    def has(self, rank: int, which: int) -> bool:
        start, end = self.ends[which] - self.numbers(which), self.ends[which]
        return start < (rank + 1) * self.size and end > rank * self.size

    def touched(self, rank: int) -> int:
        """Numbers of all parameters of which a rank has a part."""
        return int(self._touched(np.array([rank]))[0])

    def _touched(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        ends = np.array([0, *self.ends])  # before the first parameter, and after each
        first = np.searchsorted(ends[1:], ranks * self.size, "right")
        last = np.searchsorted(ends[1:], (ranks + 1) * self.size, "left") + 1
        return ends[np.minimum(last, len(self.ends))] - ends[first]

    def most_touched(self) -> int:
        return int(self._touched(np.arange(self.ranks)).max())

    def fullest(self) -> int:
        """The rank that has parts of the largest parameters."""
        return int(self._touched(np.arange(self.ranks)).argmax())


class Arriving(NamedTuple):
    """A gradient that is there. which: the place of its parameter in the model; living: bytes of all else, with it."""

    which: int
    numbers: int
    living: float


def arriving(blocks: Sequence[Block], samples: float, others: Sequence[float]) -> Iterator[Arriving]:
    """Last block first. others: what else lives while each block runs backward. A tied gradient waits, from the last
    block on, for that of the first block."""
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block.parameters))
    tied = 0.0
    for index in range(len(blocks) - 1, -1, -1):
        for arrival in blocks[index].arrivals:
            living = arrival.living.at(samples) + others[index] + tied
            if arrival.which is None:
                tied += 4.0 * arrival.numbers
            else:
                yield Arriving(starts[index] + arrival.which, arrival.numbers, living)


@dataclass
class Bucket:
    """The gradients that wait to be reduced, in numbers. limit: of the bucket; copied: of so many parameters' gradients
    what is copied to reduce them; owned, kept: whether a rank keeps a parameter's gradient, and the numbers of all that
    it keeps, for which it makes room when the first of them is reduced"""

    limit: int
    numbers: Callable[[int], int]
    copied: Callable[[Sequence[int]], int]
    owned: Callable[[int], bool] = lambda _: False
    kept: int = 0

    def __post_init__(self) -> None:
        self.held = list[int]()
        self.elements = 0
        self.room = 0  # for what is kept

    @property
    def outside(self) -> int:
        """Of a gradient that is larger than the bucket and waits beside it."""
        return self.elements if self.elements > self.limit else 0

    @property
    def beside(self) -> int:
        """The bucket."""
        return self.outside + self.room

    def full(self, which: int) -> bool:
        return self.elements + self.numbers(which) > self.limit

    def put(self, which: int) -> None:
        self.held.append(which)
        self.elements += self.numbers(which)

    def reduce(self) -> int:
        """The most that lives meanwhile beside the bucket and what waits outside."""
        most = self.room + (self.copied(self.held) if self.held else 0)
        if any(map(self.owned, self.held)):
            self.room = self.kept
        self.held.clear()
        self.elements = 0
        return max(most, self.room)

    def arrives(self, which: int) -> int:
        """The most that lives beside the bucket and the gradient that arrives."""
        outside = self.outside
        most = outside + (self.reduce() if self.full(which) else self.room)
        self.put(which)
        return most

    def end(self) -> int:
        return self.outside + self.reduce()


def sliced(shards: Shards, limit: int) -> Callable[[Sequence[int]], int]:
    """Of stages 1 and 2: parts of the same rank that lie side by side are one piece, and pieces are reduced together
    until they are more than a bucket."""

    def copied(held: Sequence[int]) -> int:
        pieces, before = list[int](), -1
        for rank, numbers in (part for which in held for part in shards.slices(which)):
            if rank == before:
                pieces[-1] += numbers
            else:
                pieces.append(numbers)
            before = rank
        most = together = count = 0
        for numbers in pieces:
            together, count = together + numbers, count + 1
            most = max(most, together if count > 1 else 0)
            if together > limit:
                together = count = 0
        return most

    return copied


def interleaved(shards: Shards) -> Callable[[Sequence[int]], int]:
    """Of stage 3: every parameter is cut among all ranks, with padding where they do not divide it."""

    def copied(held: Sequence[int]) -> int:
        numbers = [ceil(shards.numbers(which) / shards.ranks) * shards.ranks for which in held]
        return 0 if len(held) == 1 and numbers[0] == shards.numbers(held[0]) else sum(numbers)

    return copied
