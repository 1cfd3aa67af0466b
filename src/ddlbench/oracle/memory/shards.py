"""Peak memory of a rank whose weights are in shards: FSDP, HSDP and DeepSpeed's ZeRO 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.oracle.memory.passes import Moment, Rank, largest_tensor, update_copies
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.recipe.optimizers import costs


@dataclass(frozen=True)
class Gathered:
    """The weights that are gathered.

    number_bytes: bytes of one number; temporary: bytes of each block's weights that are gathered for each of its
    passes; stay: bytes of the weights that stay gathered from the forward to the backward pass
    """

    number_bytes: int
    temporary: Sequence[float]
    stay: float


def fsdp(setting: Setting, shards: int, gathered: Gathered) -> Memory:
    """Forward, a rank has the weights of the block and the buffer of their all-gather; backward, the weights of the
    block and of the next one, and the gradients of the last one, which are being reduced. With several micro batches it
    adds up complete gradients."""
    rank, weights = Rank(setting, setting.counts, setting.world), gathered.temporary
    sent = [FP32_BYTES * float(block.numbers) for block in setting.counts.blocks]
    backward = map(sum, zip(weights, [0.0, *weights[:-1]], [*sent[1:], 0.0], strict=True))
    in_passes = list(zip((2 * bytes_ for bytes_ in weights), backward, strict=True))
    accumulating = rank.micro_batches > 1
    during = rank.passes(accumulating, shards, gathered.number_bytes == FP32_BYTES, in_passes)
    states, copies = rank.states(3, shards), update_copies(setting.optimizer, setting.counts.blocks, 1 / shards)
    moments = during.plus(rank.gradients if accumulating else 0.0), Moment(states.gradients, copies)
    return rank.peak(states, moments, gathered.stay)


def zero3(setting: Setting, gathered: Gathered, bucket: float, persistent: float) -> Memory:
    """The share of the gradients and a bucket are permanent. While a block runs, a rank has all weights that stay
    gathered, those of the block, and a copy of the bucket, or of a larger gradient, for its reduction. The update is of
    all shards at once.

    bucket: bytes; persistent: bytes of weights that every rank keeps
    """
    rank, stay = Rank(setting, setting.counts, setting.world), gathered.stay
    states = rank.states(3, setting.world, own_copy=True)
    copy = max(bucket, largest_tensor(setting.counts.blocks)) if rank.gradients > bucket else 0.0
    in_passes = [(stay + bytes_, stay + bytes_) for bytes_ in gathered.temporary]
    moments = (
        rank.passes(True, 1, gathered.number_bytes == FP32_BYTES, in_passes).plus(states.gradients, copy),
        Moment(states.gradients, stay + min(bucket, rank.gradients)),
        Moment(states.gradients, states.gradients * costs(setting.optimizer).copies),
    )
    return rank.peak(replace(states, parameters=states.parameters + persistent), moments, bucket)
