"""The work, memory and messages of the blocks of a model, as numbers (counting.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddlbench.frameworks.spatial.layers import Window
from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.recomputation import Link

Floats = NDArray[np.float64]
Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True)
class Line(Generic[Amount]):
    """A number, or one number per operation, that depends on the batch size: fixed + per_sample * samples."""

    fixed: Amount
    per_sample: Amount

    def at(self, samples: float) -> Amount:
        return self.fixed + self.per_sample * samples


NOTHING = Line(np.zeros(1), np.zeros(1))


@dataclass(frozen=True)
class Work:
    """The operations of one direction of one block.

    flops: of one sample; moved: bytes read and written; shared: whether tensor parallelism divides the operation
    """

    flops: Floats
    moved: Line[Floats]
    shared: NDArray[np.bool_]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """A module that tensor parallelism splits, with the bytes of its input and its output for one sample.

    first: nothing before it needs a gradient, so the gradient of its input is not summed
    added_on_cpu: how many bytes ranks on CPUs send to add up one byte (`sum_type`)
    """

    style: str
    input_bytes: float
    output_bytes: float
    first: bool = False
    added_on_cpu: float = 1.0


@dataclass(frozen=True)
class Rows:
    """A convolution or pooling, whose window may reach over the border of a part of an image.

    row: bytes of one row of its input for one sample
    first: nothing before it needs a gradient, so no gradient of its input is sent
    """

    name: str
    window: Window
    row: float
    first: bool = False


@dataclass(frozen=True)
class Block:
    """One named block of a model. The last block includes the loss.

    tensor_sizes: numbers of parameters in its tensors, without tensors of an earlier block
    split_parameters: parameters in tensors that tensor parallelism divides
    output: bytes of its output for one sample; unsaved_output: the same, 0 if autograd saves the output
    weighted_outputs: bytes of the outputs of its layers with weights for one sample
    saved: bytes that autograd saves for the backward pass, without those that an earlier block has saved
    buffers: bytes of its buffers
    live_forward, live_backward: bytes in memory after each operation of a pass, without the bytes that earlier blocks
        have saved; with temporary results and, in the backward pass, the gradients of its parameters that have arrived
    live_accumulating: as live_backward, if gradients are added to existing gradients, which do not count
    selective: its cheap operators, and the collectives between them, run again as a part of its backward pass
    """

    name: str
    forward: Work
    backward: Work
    tensor_sizes: tuple[int, ...]
    split_parameters: int
    output: float
    saved: Line[float]
    buffers: int
    exchanges: tuple[Exchange, ...]
    rows: tuple[Rows, ...]
    unsaved_output: float = 0.0
    weighted_outputs: float = 0.0
    live_forward: Line[Floats] = NOTHING
    live_backward: Line[Floats] = NOTHING
    live_accumulating: Line[Floats] = NOTHING
    selective: bool = False

    @cached_property
    def parameter_count(self) -> int:
        return sum(self.tensor_sizes)

    def parameters_of_part(self, tp: int) -> float:
        """Parameters of one of tp ranks that share the block."""
        return self.parameter_count - self.split_parameters * (1 - 1 / tp)

    @cached_property
    def flops(self) -> float:
        """FLOPs of one sample's forward pass."""
        return float(self.forward.flops.sum())

    def link(self, samples: float, accumulating: bool = True) -> Link:
        """For a micro batch. accumulating: gradients are added to existing ones"""
        lives = self.live_forward, self.live_accumulating if accumulating else self.live_backward
        ahead, back = (float(np.max(live.at(samples), initial=0.0)) for live in lives)
        return Link(
            self.flops * samples,
            self.saved.at(samples),
            self.output * samples,
            self.unsaved_output * samples,
            ahead,
            back,
            self.saved.fixed,
        )

    def with_16_bit_weights(self) -> Block:
        """This block with weights in 16 bits: no 16-bit copies of them are made, and none are saved. (A `selective`
        block does not save them anyway.)"""
        copies = self.parameter_count * FP32_BYTES / 2
        lines = {name: line for name, line in vars(self).items() if isinstance(line, Line)}
        if self.selective:
            del lines["saved"]
        return replace(self, **{name: Line(line.fixed - copies, line.per_sample) for name, line in lines.items()})


@dataclass(frozen=True)
class Share:
    """The part of a model that one rank has: by default all of it.

    tp: ranks that share every layer; sequence: with sequence parallelism; sp: ranks that share the rows of images
    cast: the weights themselves are in the job's precision (Megatron-LM, DeepSpeed's engines), not fp32 weights with
        autocast
    gathered: every rank has the logits of all classes for the loss, which is not computed from split logits
    selective: cheap operators run again in the backward pass (recomputation.py)
    """

    tp: int = 1
    sequence: bool = False
    sp: int = 1
    cast: bool = False
    gathered: bool = False
    selective: bool = False


UNSHARED = Share()


@dataclass(frozen=True)
class Counts:
    """The blocks of a model. tied: size of the parameter that the first and the last block share, else 0"""

    blocks: tuple[Block, ...]
    tied: int

    @cached_property
    def parameter_count(self) -> int:
        return sum(block.parameter_count for block in self.blocks)
