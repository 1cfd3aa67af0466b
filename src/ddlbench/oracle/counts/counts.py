"""What each block of a model computes, moves, keeps and exchanges, as numbers (counting.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """A number that depends on the batch size: fixed + each * samples."""

    fixed: float
    each: float

    def at(self, samples: float) -> float:
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Moments:
    """Bytes that live at some moments of a pass."""

    lines: tuple[Line, ...] = ()

    def most(self, samples: float) -> float:
        return max((line.at(samples) for line in self.lines), default=0.0)


@dataclass(frozen=True)
class Work:
    """The operations of one direction of one block; an entry for each.

    flops: of one sample; fixed, each: bytes that are read and written; shared: tensor parallelism divides it
    """

    flops: Numbers
    fixed: Numbers
    each: Numbers
    shared: NDArray[np.bool_]

    def bytes_at(self, samples: float) -> Numbers:
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Exchange:
    """A module that tensor parallelism splits: bytes of one sample that go in and come out.

    first: nothing before it needs a gradient, so that its input's gradient is not summed
    """

    name: str
    style: str
    entering: float
    leaving: float
    first: bool = False


@dataclass(frozen=True)
class Arrival:
    """The gradient of one parameter of a block, in the order of the backward pass.

    which: its place among the block's own parameters; None: of a tied one, which an earlier block has
    living: as `Block.added` at that moment, this gradient included
    """

    which: int | None
    numbers: int
    living: Line


@dataclass(frozen=True)
class Block:
    """One named block of a model, the last one with the loss.

    parameters: numbers in each of its tensors, a tied one in the first block that has it only
    leaving: bytes of its output for one sample; kept: bytes that autograd keeps for its backward pass
    buffers: bytes of its buffers; halo: see `spatial`
    entering: bytes of its input for one sample, where no block before keeps it
    ahead, back: bytes that live during its forward and backward pass, beyond its input and what was there before; with
        the gradients of its parameters as they arrive. added: the latter where they are added to gradients that are
        there already, which do not count
    freeing, freeing_added: as back and added, where nothing else refers to its input, which ends with its last use
    lingering: bytes of its output for one sample, where autograd does not keep it: it lives as long as it is held
    loss: bytes of `kept` that the loss keeps, in the last block
    again: as ahead, as far as a checkpointed block runs again: to the last operation for which autograd keeps something
    turning: bytes of gradients that are there when it begins to run again
    """

    name: str
    forward: Work
    backward: Work
    parameters: tuple[int, ...]
    split_parameters: int
    leaving: float
    kept: Line
    buffers: int
    exchanges: tuple[Exchange, ...]
    rows: tuple[Rows, ...]
    entering: float = 0.0
    ahead: Moments = Moments()
    back: Moments = Moments()
    added: Moments = Moments()
    freeing: Moments = Moments()
    freeing_added: Moments = Moments()
    arrivals: tuple[Arrival, ...] = ()
    lingering: float = 0.0
    loss: Line = Line(0.0, 0.0)
    again: Moments = Moments()
    turning: Line = Line(0.0, 0.0)

    @cached_property
    def numbers(self) -> int:
        return sum(self.parameters)

    @cached_property
    def flops(self) -> float:
        """FLOPs of one sample's forward pass."""
        return float(self.forward.flops.sum())


@dataclass(frozen=True)
class Rows:
    """A convolution or pooling whose window reaches over the border of a part of an image.

    halo: rows that a neighbour has; row: bytes of one row of its input for one sample; height: rows of its input
    """

    name: str
    halo: int
    row: float
    height: int


@dataclass(frozen=True)
class Counts:
    """A model's blocks, and what ties them: numbers of the tied parameter, 0 without one, in first and last block.

    single: the blocks as they are counted with one sample, of which some copies are views; None: not known
    """

    model: str
    blocks: tuple[Block, ...]
    tied: int
    single: Callable[[], tuple[Block, ...] | None] = lambda: None

    def at(self, samples: float) -> tuple[Block, ...]:
        """The counts that predict memory with so many samples in a micro batch."""
        return (self.single() if samples == 1 else None) or self.blocks

    @cached_property
    def numbers(self) -> int:
        """Parameters of the model."""
        return sum(block.numbers for block in self.blocks)
