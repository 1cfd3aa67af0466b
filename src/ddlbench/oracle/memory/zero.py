"""The bytes of a rank under DeepSpeed's ZeRO 1, 2 and 3, as its libraries' code allocates them.

Each walks a step: forward, backward with the gradients as they arrive, reduction, update. What lives in the model's
blocks is counted (oracle/counts/counting.py), what the library holds beside is replayed (zero_buckets.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.counts.counts import Block
from ddlbench.oracle.memory.memory import Sizes, sizes
from ddlbench.oracle.memory.peak import Moment, batch, passes
from ddlbench.oracle.memory.zero_buckets import Bucket, Shards, arriving, interleaved, sliced
from ddlbench.oracle.memory.zero_gathering import Gathered
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.recipe.optimizers import costs


@dataclass(frozen=True)
class Zero:
    """How DeepSpeed runs a job. bucket: numbers; buffers: buckets that there are; overlaps: it reduces during the
    backward pass at stage 1, too"""

    stage: int
    ranks: int
    bucket: int
    buffers: int = 1
    overlaps: bool = False


def memory(setting: Setting, zero: Zero, own: Bytes, room: float) -> Memory:
    """Of stages 1 and 2, on the fullest of the ranks that can be it: the first, whose parameters are reduced first at
    stage 1, the last, whose gradients arrive first, and the one that keeps most. own: each part at most; room: bytes of
    what stays, without buckets"""
    shards = Shards.of(setting.counts.blocks, zero.ranks)
    ranks = {0, zero.ranks - 1, shards.fullest()}
    found = [_of_rank(setting, zero, own, room, shards, rank) for rank in ranks]
    return max(found, key=lambda memory: memory.total)


def _of_rank(setting: Setting, zero: Zero, own: Bytes, room: float, shards: Shards, rank: int) -> Memory:
    job = setting.job
    count = job.micro_batches(setting.world)
    samples = job.replica_batch(setting.world) / count
    blocks = setting.counts.at(samples)
    room += batch(job, samples * count, samples)
    step = _Step(zero, blocks, sizes(blocks, samples), samples, job.checkpoint_activations, count, shards, rank)
    moments = list(step.reduced_late() if zero.stage == 1 and not zero.overlaps else step.reduced_early())
    kept, flat = 4.0 * shards.touched(rank), 4.0 * shards.size
    moments.append(Moment(kept + flat, 0.0))
    moments.append(Moment(flat, flat * costs(setting.optimizer).copies))
    during = max(moments, key=sum)
    return Memory(own.parameters, during.gradients, own.optimizer, during.others, room)


@dataclass(frozen=True)
class _Step:
    """The passes of one update on a rank. count: micro batches of so many samples"""

    zero: Zero
    blocks: Sequence[Block]
    each: Sequence[Sizes]
    samples: float
    checkpointed: bool
    count: int
    shards: Shards
    rank: int

    def reduced_late(self) -> Iterator[Moment]:
        """Stage 1 without overlap: gradients are whole until the end of the backward pass. Then they go through the
        bucket in the order of the parameters. The bucket is there from the first gradient of an update on."""
        shards, limit, buffers = self.shards, self.zero.bucket, self._buffers()
        whole = 4.0 * shards.ends[-1]
        found = passes(self.each, self.checkpointed, [4.0 * block.numbers for block in self.blocks])
        yield found.ahead
        yield Moment(found.back.gradients, found.back.others + buffers)
        if self.count > 1:
            again = passes(self.each, self.checkpointed, None)
            yield Moment(whole, max(again.ahead.others, again.back.others) + buffers)
        bucket = self._bucket()
        for which in range(len(shards.ends)):
            if bucket.full(which):
                freed = bucket.outside if any(map(bucket.owned, bucket.held)) else 0
                yield Moment(whole + 4.0 * bucket.reduce(), buffers)
                whole -= 4.0 * freed
            bucket.put(which)
            whole -= 4.0 * shards.numbers(which) if shards.numbers(which) <= limit else 0.0
        yield Moment(whole + 4.0 * bucket.reduce(), buffers)

    def reduced_early(self) -> Iterator[Moment]:
        """Every gradient goes into the bucket as it arrives. A rank keeps those of which it has a part, whole; of
        several micro batches the sum and the latest."""
        sums = 4.0 * self.shards.touched(self.rank) if self.count > 1 else 0.0
        yield Moment(sums, passes(self.each, self.checkpointed, None).ahead.others)
        others, fullest = _beside(self.blocks, self.each, self.checkpointed)
        for of, beside in _back(self.blocks, self.samples, others, fullest, self._bucket()):
            yield Moment(sums + of, beside + self._buffers())

    def _buffers(self) -> float:
        return 4.0 * self.zero.bucket * self.zero.buffers

    def _bucket(self) -> Bucket:
        shards, rank, limit = self.shards, self.rank, self.zero.bucket
        return Bucket(
            limit, shards.numbers, sliced(shards, limit), lambda which: shards.has(rank, which), shards.touched(rank)
        )


def _back(
    blocks: Sequence[Block], samples: float, others: Sequence[float], fullest: Sequence[float], bucket: Bucket
) -> Iterator[tuple[float, float]]:
    """Bytes of gradients that are kept, and of all else, at the moments of a backward pass that can be the fullest.
    others, fullest: as `_beside`"""
    index, places = len(blocks), list(accumulate((len(block.parameters) for block in blocks), initial=0))
    for gradient in arriving(blocks, samples, others):
        while index > 0 and gradient.which < places[index]:
            index -= 1
            yield 4.0 * bucket.beside, fullest[index]
        yield 4.0 * bucket.arrives(gradient.which), gradient.living
    yield 4.0 * bucket.end(), 0.0


def _beside(blocks: Sequence[Block], each: Sequence[Sizes], checkpointed: bool) -> tuple[list[float], list[float]]:
    """Of each block: what the blocks before keep while it runs backward, and the most that lives then. A tied gradient
    of the last block waits for that of the first."""
    tied = 4.0 * sum(arrival.numbers for arrival in blocks[-1].arrivals if arrival.which is None)
    before, others, fullest = 0.0, list[float](), list[float]()
    for index, block in enumerate(each):
        if checkpointed:
            before += block.entering if index == 0 else each[index - 1].leaving
        others.append(before + (0.0 if checkpointed else block.entering))
        again = block.again + block.turning * (index < len(each) - 1) if checkpointed else 0.0
        fullest.append(others[-1] + max(block.added, again) + tied * (index < len(each) - 1))
        before += 0.0 if checkpointed else block.kept
    return others, fullest


@dataclass(frozen=True)
class Stage3:
    """bucket: numbers; weight: bytes of a number as it is gathered; persistent: numbers that every rank keeps whole,
    except during the update"""

    ranks: int
    bucket: int
    weight: int
    gathered: Gathered
    persistent: int


def memory3(setting: Setting, stage3: Stage3, own: Bytes, each: Sequence[Sizes], room: float) -> Memory:
    """own: with the persistent weights. It has memory for its share of the gradients and for a bucket from step to
    step. The update is of all shards at once, with a copy of the gradients, while no weights are whole."""
    job = setting.job
    samples = job.replica_batch(setting.world) / job.micro_batches(setting.world)
    blocks = setting.counts.at(samples)
    shards = Shards.of(blocks, stage3.ranks)
    bucket = Bucket(stage3.bucket, shards.numbers, interleaved(shards))
    checkpointed, weight = job.checkpoint_activations, float(stage3.weight)
    others, fullest = _beside(blocks, each, checkpointed)
    ahead = zip(others, each, stage3.gathered.ahead, strict=True)
    moments = [some + block.ahead + weight * more for some, block, more in ahead]
    others = [some + weight * more for some, more in zip(others, stage3.gathered.back, strict=True)]
    fullest = [some + weight * more for some, more in zip(fullest, stage3.gathered.back, strict=True)]
    moments += map(sum, _back(blocks, samples, others, fullest, bucket))
    room += 4.0 * stage3.bucket
    update = own.gradients * (1 + costs(setting.optimizer).copies) - weight * stage3.persistent
    during = max(*moments, update)
    return Memory(own.parameters, own.gradients, own.optimizer, during, room)
