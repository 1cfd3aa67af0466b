"""Bytes that one rank holds at its fullest: weights, gradients, optimizer state, kept activations, buffers.

The first three are those of measure/memory_formula.py. Activations are what autograd keeps, counted from the real
model. Not counted: what the device's context and its communication library take, temporary results, fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlbench.measure.memory_formula import Bytes, data_parallel, in_fp32
from ddlbench.oracle.counts import Block
from ddlbench.oracle.setting import Memory, Setting


def held(
    numbers: float, setting: Setting, stage: int = 0, ranks: int = 1, own_copy: bool = False, gradients: bool = True
) -> Bytes:
    """Of so many parameters in fp32; `stage` of ZeRO over `ranks`."""
    found = data_parallel(int(numbers), in_fp32(setting.optimizer, own_copy), stage, ranks)
    return found if gradients else Bytes(found.parameters, 0.0, found.optimizer)


def activations(
    blocks: Sequence[Block], samples: float, checkpointed: bool, in_flight: float = 1.0, tp: int = 1
) -> float:
    """Kept for the backward passes of so many micro batches. checkpointed: the inputs of blocks alone, and the block
    that is computed again (Chen et al. 2016)."""
    kept = [_kept(block, samples, tp) for block in blocks]
    if not checkpointed:
        return in_flight * sum(kept)
    inputs = sum(block.leaving * samples for block in blocks[:-1])
    return in_flight * inputs + max(kept)


def _kept(block: Block, samples: float, tp: int) -> float:
    """What is shared is kept in parts: in proportion to the bytes that the shared operations move."""
    whole = max(0.0, block.kept.at(samples))
    if tp == 1:
        return whole
    moved = block.forward.bytes_at(samples)
    shared = float(moved[block.forward.shared].sum() / moved.sum()) if moved.sum() else 0.0
    return whole * (1 - shared + shared / tp)


def buffers(blocks: Sequence[Block]) -> float:
    """Of the model: statistics of BatchNorm."""
    return float(sum(block.buffers for block in blocks))


def most_touched(sizes: Sequence[int], ranks: int) -> int:
    """The most of memory_formula.touched over the ranks: gradients of a library that keeps one whole where a border
    between shards cuts it."""
    ends = np.cumsum(sizes)
    starts, borders = ends - np.array(sizes), ends[-1] * np.arange(ranks + 1) / ranks
    first, last = np.searchsorted(ends, borders[:-1], "right"), np.searchsorted(starts, borders[1:], "left") - 1
    return int((ends[last] - starts[first]).max())


def memory(of: Bytes, activations_: float, buffers_: float) -> Memory:
    return Memory(of.parameters, of.gradients, of.optimizer, activations_, buffers_)
