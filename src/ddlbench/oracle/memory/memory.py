"""Bytes that one rank holds at its fullest: weights, gradients, optimizer state, kept activations, buffers.

The first three are those of memory_formula.py. Activations are what autograd keeps, counted from the real
model. peak.py has when they are there at once, and temporary results. Not counted: what the device's context and its
communication library take, fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddlbench.measure.formulas.memory_formula import Bytes, data_parallel, in_fp32
from ddlbench.oracle.counts.counting import count
from ddlbench.oracle.counts.counts import Block, Counts
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.recipe.losses import CrossEntropy


def held(
    numbers: float, setting: Setting, stage: int = 0, ranks: int = 1, own_copy: bool = False, gradients: bool = True
) -> Bytes:
    """Of so many parameters in fp32; `stage` of ZeRO over `ranks`."""
    found = data_parallel(int(numbers), in_fp32(setting.optimizer, own_copy), stage, ranks)
    return found if gradients else Bytes(found.parameters, 0.0, found.optimizer)


class Sizes(NamedTuple):
    """Bytes of one block for one micro batch on one rank, as `Block` explains them."""

    entering: float
    leaving: float
    kept: float
    ahead: float
    back: float
    added: float
    lingering: float = 0.0
    loss: float = 0.0
    again: float = 0.0
    turning: float = 0.0
    freeing: float = 0.0
    freeing_added: float = 0.0


def sizes(blocks: Sequence[Block], samples: float) -> list[Sizes]:
    return [
        Sizes(
            block.entering * samples,
            block.leaving * samples,
            max(0.0, block.kept.at(samples)),
            block.ahead.most(samples),
            block.back.most(samples),
            block.added.most(samples),
            block.lingering * samples,
            block.loss.at(samples),
            block.again.most(samples),
            block.turning.at(samples),
            block.freeing.most(samples),
            block.freeing_added.most(samples),
        )
        for block in blocks
    ]


def parts(setting: Setting, samples: float, tp: int, sequence: bool = False) -> list[Sizes]:
    """Of one of tp ranks that share every layer. Whole activations stay and shares shrink, a + b / tp: where 4 divides
    tp, from what is counted of one of 2 and of one of 4 ranks; else counted."""
    if tp == 1:
        return sizes(setting.counts.at(samples), samples)
    if tp == 2 or tp % 4:
        return sizes(_counted(setting, tp, sequence).at(samples), samples)
    two, four = (sizes(_counted(setting, ranks, sequence).at(samples), samples) for ranks in (2, 4))
    way = 4 / tp - 1
    return [
        Sizes(*(small + (large - small) * way for large, small in zip(half, quarter, strict=True)))
        for half, quarter in zip(two, four, strict=True)
    ]


def _counted(setting: Setting, tp: int, sequence: bool) -> Counts:
    job = setting.job
    return count(job.model, job.precision, setting.machine.device.type, smoothing(setting), tp, sequence)


def smoothing(setting: Setting) -> float:
    loss = setting.job.loss
    return loss.label_smoothing if isinstance(loss, CrossEntropy) else 0.0


def activations(blocks: Sequence[Sizes], checkpointed: bool, in_flight: float = 1.0) -> float:
    """Kept for the backward passes of so many micro batches. checkpointed: the inputs of blocks alone, and the block
    that is computed again (Chen et al. 2016)."""
    if not checkpointed:
        return in_flight * sum(block.kept for block in blocks)
    return in_flight * sum(block.leaving for block in blocks[:-1]) + max(block.kept for block in blocks)


def buffers(blocks: Sequence[Block]) -> float:
    """Of the model: statistics of BatchNorm."""
    return float(sum(block.buffers for block in blocks))


def memory(of: Bytes, activations_: float, buffers_: float, fullest: Memory | None = None) -> Memory:
    return Memory(of.parameters, of.gradients, of.optimizer, activations_, buffers_, fullest)
