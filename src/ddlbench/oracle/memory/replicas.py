"""Peak memory of a rank in the passes of one micro batch, and in a job without stages, with all weights or with shards.

In the backward pass gradients arrive block by block while saved activations are freed, so the two maxima are at
different moments. The contexts of CUDA and NCCL, workspaces of kernels and fragmentation are not included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from ddlbench.counts.counting import count_job
from ddlbench.counts.counts import Block, Counts, Share
from ddlbench.job import Job, example_batch
from ddlbench.measure.formulas.memory_formula import FP32_BYTES, Bytes, bytes_of_parameter, data_parallel, touched
from ddlbench.oracle.setting import BYTES, Memory, Setting
from ddlbench.recipe.optimizers import Costs
from ddlbench.recomputation import Plan, instants


class Moment(NamedTuple):
    """Bytes at one moment of a step: gradients, and activations with temporary results and buffers of the library."""

    gradients: float
    activations: float

    def plus(self, gradients: float, activations: float = 0.0) -> Moment:
        return Moment(self.gradients + gradients, self.activations + activations)


def passes(
    blocks: Sequence[Block],
    samples: float,
    plan: Plan,
    gradients: Sequence[float],
    accumulating: bool,
    gathered: Sequence[tuple[float, float]] = (),
) -> Moment:
    """The peak of one micro batch: forward block by block, then backward.

    plan: which blocks run again
    gradients: bytes that stay in memory from the backward pass of each block on (`arriving`)
    accumulating: gradients are added to existing ones
    gathered: bytes that the library has in memory while each block runs forward and backward
    """
    peak = Moment(0.0, 0.0)
    for run in instants(plan, [block.link(samples, accumulating) for block in blocks]):
        beside = gathered[run.block][run.backward] if gathered else 0.0
        peak = max(peak, Moment(sum(gradients[run.done :]), run.bytes_ + beside), key=sum)
    return peak


def arriving(counts: Counts, accumulating: bool, shards: int = 1, number_bytes: int = FP32_BYTES) -> list[float]:
    """Bytes of the gradients that each block adds in a backward pass. The gradient of a tied parameter from the last
    block waits for the gradient from the first block. accumulating: the gradients have memory already; number_bytes: of
    a gradient"""
    parameters = [0.0 if accumulating else block.parameter_count / shards for block in counts.blocks]
    parameters[0] -= 0.0 if accumulating else counts.tied / shards
    parameters[-1] += counts.tied
    return [number_bytes * count for count in parameters]


def update_copies(optimizer: Costs, blocks: Sequence[Block], part: float = 1.0) -> float:
    """Bytes of temporary results of the update, which handles one tensor at a time. part: the share of each tensor on
    this rank"""
    largest = max((size for block in blocks for size in block.tensor_sizes), default=0)
    return optimizer.copies * FP32_BYTES * float(largest) * part


def batch_bytes(job: Job, samples: float) -> float:
    """Bytes of a replica's batch."""
    one = example_batch(job.model, 1)
    return samples * (one.inputs.nbytes + one.targets.nbytes + one.valid.nbytes)


def at_peak(states: Bytes, moments: Iterable[Moment], permanent: float) -> Memory:
    """The parts of a rank's memory at the moment with the most bytes. permanent: other bytes that stay all the time"""
    peak = max(moments, key=sum)
    return Memory(states.parameters, peak.gradients, states.optimizer, peak.activations, permanent)


def counts_of_rank(setting: Setting, share: Share) -> Counts:
    """The counts of a rank's share of the model."""
    if share.tp == share.sp == 1 and not share.cast:
        return setting.counts
    return count_job(setting.job, setting.machine.device.type, share)


class Rank:
    """One rank of a job with dp replicas.

    counts: of the rank's part of the model; gradients: bytes of all its gradients; number_bytes: of a weight and of a
        gradient
    accumulates: whether it adds up the gradients of several micro batches; samples: of a micro batch
    """

    def __init__(self, setting: Setting, counts: Counts, dp: int, number_bytes: int = FP32_BYTES) -> None:
        self.setting, self.counts, self.dp, self.number_bytes = setting, counts, dp, number_bytes
        micro_batches, self.samples = setting.micro_batch(dp)
        self.accumulates = micro_batches > 1
        self.gradients = number_bytes * float(counts.parameter_count)

    def states(self, stage: int, shards: int, own_copy: bool = False) -> Bytes:
        """Weights, gradients and optimizer state at a stage of ZeRO."""
        sizes = [ceil(size / shards) for block in self.counts.blocks for size in block.tensor_sizes]  # of a rank
        of_parameter = bytes_of_parameter(self.setting.computation.optimizer, own_copy, self.number_bytes, sizes)
        return data_parallel(self.counts.parameter_count, of_parameter, stage, shards)

    def passes(
        self,
        accumulating: bool,
        shards: int = 1,
        casts: bool = True,
        gathered: Sequence[tuple[float, float]] = (),
        sums: bool = True,
    ) -> Moment:
        """The peak of one micro batch. shards: of the gradients that stay; casts: autograd saves 16-bit copies of the
        weights; sums: the two gradients of a tied parameter and their sum are in memory at the same time"""
        blocks = self.counts.blocks
        blocks = blocks if casts else [block.with_16_bit_weights() for block in blocks]
        arrived = arriving(self.counts, accumulating, shards, self.number_bytes)
        (ahead, back), *others = gathered or [(0.0, 0.0)] * len(blocks)
        first = ahead, back + sums * self.number_bytes * self.counts.tied
        return passes(blocks, self.samples, self.setting.plan(self.samples), arrived, accumulating, [first, *others])

    def peak(self, states: Bytes, moments: Iterable[Moment], buffers: float) -> Memory:
        """buffers: permanent bytes of the library, beside the model's buffers (BatchNorm's statistics) and the batch"""
        job, statistics = self.setting.job, float(sum(block.buffers for block in self.counts.blocks))
        return at_peak(states, moments, buffers + statistics + batch_bytes(job, job.replica_batch(self.dp)))


def replica(
    setting: Setting,
    counts: Counts,
    dp: int,
    bucketed: bool = False,
    reduced: float = 0.0,
    views: bool = True,
    sent: Sequence[float] = (),
) -> Memory:
    """All weights on each rank: data parallelism and tensor parallelism. The peak is in the passes or in the update.

    bucketed: the gradients are in DDP's buckets, which are permanent; with several micro batches the gradients wait
        beside the buckets
    reduced: bytes of gradients that are copied to be reduced after the backward pass
    views: False: the gradients have memory beside the buckets (framework.gradient_as_bucket_view)
    sent: bytes of the copy of a bucket that is sent in another type, in the backward pass of each block; of the first
        block after it
    """
    rank = Rank(setting, counts, dp)
    accumulating = rank.accumulates or (bucketed and views)
    buckets = rank.gradients if bucketed and (rank.accumulates or not views) else 0.0
    beside = [(0.0, copy) for copy in (0.0, *sent[1:])] if sent else []
    reduced = max([reduced, *sent[:1]])
    moments = (
        rank.passes(accumulating, gathered=beside).plus(rank.gradients if accumulating else 0.0),
        Moment(rank.gradients, max(reduced, update_copies(setting.computation.optimizer, counts.blocks))),
    )
    return rank.peak(rank.states(0, 1), moments, buckets)


def zero(setting: Setting, stage: int, bucket: float, overlaps: bool, casts: bool) -> Memory:
    """ZeRO 1 and 2 (Rajbhandari et al. 2020) in DeepSpeed. A gradient is copied into a bucket, and a full bucket is
    copied. A gradient that is larger than the bucket stays beside it. Stage 1 without overlap does this after the
    backward pass. In all other cases a rank has only its share of the gradients.

    bucket: numbers; overlaps: gradients are reduced during the backward pass, with two buckets
    casts: weights and gradients are in 16 bits; the update casts the rank's share of the gradients to fp32
    """
    number_bytes = BYTES[setting.job.precision] if casts else FP32_BYTES
    rank = Rank(setting, counts_of_rank(setting, Share(cast=casts)), setting.job.world_size, number_bytes)
    share, bucket = rank.gradients / setting.job.world_size, bucket * number_bytes
    sizes = [size for block in rank.counts.blocks for size in block.tensor_sizes]
    largest = number_bytes * float(max(sizes))
    update = Moment(share, share * FP32_BYTES / number_bytes * (setting.computation.optimizer.copies + casts))
    if stage == 1 and not overlaps:
        during = rank.passes(rank.accumulates).plus(rank.gradients if rank.accumulates else 0.0)
        reduction = Moment(rank.gradients, share + (largest if largest > bucket else 0.0))
    else:
        kept = share
        if rank.accumulates:  # beside the sum: complete gradients of the tensors of which the rank has a part
            kept += number_bytes * float(touched(sizes, setting.job.world_size).max())
        during = rank.passes(accumulating=True).plus(kept, max(bucket, largest) if rank.gradients > bucket else 0.0)
        reduction = Moment(kept, min(bucket, rank.gradients))
    buckets = bucket * (2 if overlaps else 1)
    return rank.peak(rank.states(stage, setting.job.world_size, own_copy=True), (during, reduction, update), buckets)


@dataclass(frozen=True)
class Scheme:
    """How weights in shards are gathered and gradients are reduced.

    weight: bytes of a number of the weights in the messages
    gathered: parameters of each block that are gathered; again: whether they are gathered for the backward pass, too
    always: gradients are reduced after every micro batch, not only after the last micro batch
    persistent: parameters that every rank keeps complete, and that are gathered once, after the update
    """

    shards: int
    weight: int
    gathered: tuple[int, ...]
    again: tuple[bool, ...]
    always: bool
    persistent: int = 0

    @property
    def gathered_bytes(self) -> tuple[list[float], float]:
        """Bytes of each block's weights that are gathered for each of its passes, and of all weights that stay gathered
        from the forward to the backward pass."""
        temporary = [float(self.weight * n * again) for n, again in zip(self.gathered, self.again, strict=True)]
        return temporary, float(self.weight * sum(self.gathered)) - sum(temporary)


def fsdp(setting: Setting, scheme: Scheme) -> Memory:
    """In the forward pass a rank has the weights of the block and the buffer of their all-gather. In the backward pass
    it has the weights of the block and of the next block, and the gradients of the last block, which are being reduced.
    With several micro batches it adds up complete gradients."""
    rank, shards = Rank(setting, setting.counts, setting.job.world_size), scheme.shards
    weights, stay = scheme.gathered_bytes
    sent = [FP32_BYTES * float(block.parameter_count) for block in setting.counts.blocks]
    backward = map(sum, zip(weights, [0.0, *weights[:-1]], [*sent[1:], 0.0], strict=True))
    in_passes = list(zip((2 * bytes_ for bytes_ in weights), backward, strict=True))
    during = rank.passes(rank.accumulates, shards, scheme.weight == FP32_BYTES, in_passes)
    copies = update_copies(setting.computation.optimizer, setting.counts.blocks, 1 / shards)
    states = rank.states(3, shards)
    moments = during.plus(rank.gradients if rank.accumulates else 0.0), Moment(states.gradients, copies)
    return rank.peak(states, moments, stay)


def zero3(setting: Setting, scheme: Scheme, bucket: float) -> Memory:
    """DeepSpeed's ZeRO 3. The rank's share of the gradients and a bucket of so many bytes are permanent. While a block
    runs, the rank also has all weights that stay gathered and those of the block, and in the backward pass a copy of
    the bucket for its reduction. The update is of all shards at once.

    A gradient that is larger than the bucket is reduced when the next one arrives: before the block before it has its
    own gradients. Alone it is copied only if its type changes or if it needs padding
    (deepspeed/runtime/comm/coalesced_collectives.py).
    """
    number_bytes, (weights, stay) = scheme.weight, scheme.gathered_bytes
    rank = Rank(setting, setting.counts, setting.job.world_size, number_bytes)
    states = rank.states(3, setting.job.world_size, own_copy=True)
    copy, waiting = bucket if rank.gradients > bucket else 0.0, list[float]()
    for block in setting.counts.blocks:
        size = max(block.tensor_sizes, default=0)
        copied = FP32_BYTES if number_bytes < FP32_BYTES or size % scheme.shards else 0
        waiting.append(float((number_bytes + copied) * size) if FP32_BYTES * size > bucket else 0.0)
    in_passes = [
        (stay + bytes_, stay + bytes_ + max(copy, later - number_bytes * block.parameter_count))
        for bytes_, block, later in zip(weights, setting.counts.blocks, [*waiting[1:], 0.0], strict=True)
    ]
    moments = (
        rank.passes(True, 1, number_bytes == FP32_BYTES, in_passes, sums=False).plus(states.gradients),
        Moment(states.gradients, stay + max(min(bucket, rank.gradients), waiting[0])),
        Moment(states.gradients, FP32_BYTES / number_bytes * states.gradients * setting.computation.optimizer.copies),
    )
    kept = states.parameters + scheme.persistent * scheme.weight
    return rank.peak(replace(states, parameters=kept), moments, bucket)
