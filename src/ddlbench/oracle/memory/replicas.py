"""Peak memory of a rank that has all weights: data parallelism, tensor parallelism, DeepSpeed's ZeRO 1 and 2."""

from __future__ import annotations

from ddlbench.oracle.counts.counts import Counts
from ddlbench.oracle.memory.passes import Moment, Rank, largest_tensor, update_copies
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.recipe.optimizers import costs


def replica(
    setting: Setting, counts: Counts, dp: int, in_place: bool = False, buckets: float = 0.0, reduced: float = 0.0
) -> Memory:
    """The peak is in the passes or in the update.

    in_place: gradients have memory from step to step; buckets: bytes of buckets beside it; reduced: bytes of gradients
    that are copied to be reduced after the backward pass
    """
    rank = Rank(setting, counts, dp)
    accumulating = in_place or rank.micro_batches > 1
    moments = (
        rank.passes(accumulating).plus(rank.gradients if accumulating else 0.0),
        Moment(rank.gradients, max(reduced, update_copies(setting.optimizer, counts.blocks))),
    )
    return rank.peak(rank.states(0, 1), moments, buckets)


def zero(setting: Setting, stage: int, bucket: float, overlaps: bool) -> Memory:
    """ZeRO 1 and 2. Gradients go into a bucket and are copied when it is full; one larger than the bucket stays beside
    it. Stage 1 without overlap does this after the backward pass, otherwise a rank keeps its share of the gradients.

    bucket: bytes; overlaps: gradients are reduced during the backward pass, with two buckets
    """
    rank = Rank(setting, setting.counts, setting.world)
    share, largest = rank.gradients / setting.world, largest_tensor(setting.counts.blocks)
    update = Moment(share, share * costs(setting.optimizer).copies)
    if stage == 1 and not overlaps:
        accumulating = rank.micro_batches > 1
        during = rank.passes(accumulating).plus(rank.gradients if accumulating else 0.0)
        reduction = Moment(rank.gradients, share + (largest if largest > bucket else 0.0))
    else:
        kept = share * (2 if rank.micro_batches > 1 else 1)
        during = rank.passes(accumulating=True).plus(kept, max(bucket, largest) if rank.gradients > bucket else 0.0)
        reduction = Moment(kept, min(bucket, rank.gradients))
    buckets = bucket * (2 if overlaps else 1)
    return rank.peak(rank.states(stage, setting.world, own_copy=True), (during, reduction, update), buckets)
