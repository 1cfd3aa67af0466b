"""The fullest moment of a step: bytes that live at once on a rank, with temporary results.

Gradients arrive block by block while kept activations are freed, so the most of each part is not there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddlbench.job import Job, example_batch
from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.counts.counts import Block
from ddlbench.oracle.memory.memory import Sizes, sizes
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.recipe.optimizers import costs


class Moment(NamedTuple):
    """Bytes: of gradients of whole blocks, and of all else that lives during the passes."""

    gradients: float
    others: float


@dataclass(frozen=True)
class Beside:
    """Bytes that a library has for a block while it runs, in each of the two passes."""

    ahead: Sequence[float]
    back: Sequence[float]


class Passes(NamedTuple):
    """The fullest moment of each of the two passes of a micro batch."""

    ahead: Moment
    back: Moment


def passing(
    blocks: Sequence[Sizes], checkpointed: bool, gradients: Sequence[float] | None, beside: Beside | None = None
) -> Moment:
    """The fullest moment of one micro batch's passes, beyond what lives from step to step."""
    return max(passes(blocks, checkpointed, gradients, beside), key=sum)


def passes(
    blocks: Sequence[Sizes], checkpointed: bool, gradients: Sequence[float] | None, beside: Beside | None = None
) -> Passes:
    """gradients: bytes of each block's, which stay once they are there; None: they are added to some from before"""
    found, before = Passes(Moment(0.0, 0.0), Moment(0.0, 0.0)), 0.0
    arrived = sum(gradients or ())
    for index, block in enumerate(blocks):
        arrived -= gradients[index] if gradients else 0.0
        ahead, entering = block.ahead, block.entering
        if index > 0 and (checkpointed or entering):  # nothing else refers to the block's input
            back = block.freeing if gradients else block.freeing_added
        else:
            back = block.back if gradients else block.added
        if checkpointed:  # every block keeps its input, and runs again while the gradient of its output is there
            before += entering if index == 0 else blocks[index - 1].leaving
            back = max(back, block.again + block.turning * (index < len(blocks) - 1))
            entering = 0.0
        ahead, back = ahead + before + entering, back + before + entering
        if beside is not None:
            ahead, back = ahead + beside.ahead[index], back + beside.back[index]
        found = Passes(max(found.ahead, Moment(0.0, ahead), key=sum), max(found.back, Moment(arrived, back), key=sum))
        if not checkpointed:
            before += block.kept
    return found


def arriving(blocks: Sequence[Block], tied: float, parts: Sequence[float] | None = None) -> list[float]:
    """Bytes of each block's gradients in fp32. The gradient of a tied parameter is there from the last block on."""
    numbers = list(parts) if parts is not None else [float(block.numbers) for block in blocks]
    if tied:
        numbers[0], numbers[-1] = numbers[0] - tied, numbers[-1] + tied
    return [4.0 * number for number in numbers]


def waiting(blocks: int, tied: float) -> Beside:
    """The gradient of a tied parameter's use in the last block waits for that of its use in the first: torch adds them
    up before it adds them to those of earlier micro batches."""
    return Beside([0.0] * blocks, [4.0 * tied] * (blocks - 1) + [0.0])


def updating(optimizer: str, blocks: Sequence[Block], part: float = 1.0) -> float:
    """Temporary results of the update, tensor by tensor. part: of each tensor, on this rank."""
    largest = max((number for block in blocks for number in block.parameters), default=0)
    return 4.0 * costs(optimizer).copies * largest * part


def batch(job: Job, samples: float, micro: float) -> float:
    """Bytes of a replica's batch. The first block keeps the inputs of a micro batch: those count as its own."""
    one = example_batch(job.model, 1)
    return samples * (one.inputs.nbytes + one.targets.nbytes + one.valid.nbytes) - micro * one.inputs.nbytes


def fullest(own: Bytes, during: Moment, room: float, update: float, in_place: bool) -> Memory:
    """The parts at the fullest moment: in the passes or in the update. during: `passing`; room: other bytes that stay;
    in_place: whole gradients are there from the start."""
    gradients = own.gradients if in_place else during.gradients
    if own.gradients + update > gradients + during.others:
        gradients, during = own.gradients, Moment(0.0, update)
    return Memory(own.parameters, gradients, own.optimizer, during.others, room)


def of_replica(
    setting: Setting, own: Bytes, samples: float, count: int, room: float, in_place: bool, reduced: float = 0.0
) -> Memory:
    """A whole replica. in_place: the library keeps memory for gradients from step to step; reduced: bytes of gradients
    that are copied to be reduced, after all are there."""
    job, counts = setting.job, setting.counts
    stays = in_place or count > 1
    gradients = None if stays else arriving(counts.blocks, counts.tied)
    beside = waiting(len(counts.blocks), counts.tied) if stays else None
    during = passing(sizes(counts.at(samples), samples), job.checkpoint_activations, gradients, beside)
    room += batch(job, samples * count, samples)
    return fullest(own, during, room, max(reduced, updating(setting.optimizer, counts.blocks)), stays)
