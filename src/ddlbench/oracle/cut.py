"""A pipeline's cut: which blocks each rank has, and the memory that they take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ddlbench.oracle import schedule
from ddlbench.oracle.memory import Sizes, activations, buffers, held, parts
from ddlbench.oracle.peak import Moment, batch, fullest, passing, updating
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.oracle.tensor import own_numbers


@dataclass(frozen=True)
class Cut:
    """dp x tp x pp ranks; sizes: blocks of each stage; count: micro batches; shards: replicas that share the update."""

    schedule: str
    dp: int
    tp: int
    pp: int
    sizes: tuple[int, ...]
    count: int
    sharded: bool = False
    versions: bool = False  # of the weights, while minibatches are in flight
    buffered: bool = False  # gradients of two minibatches at once

    def spans(self) -> list[tuple[int, int]]:
        """First and last block + 1 of each stage."""
        return list(pairwise([0, *accumulate(self.sizes)]))


def of_ranks(stages: Sequence[float], ranks: int) -> list[float]:
    return [sum(stages[rank::ranks]) for rank in range(ranks)]


def rank_numbers(cut: Cut, setting: Setting) -> list[float]:
    """Parameters of each rank of a pipeline. A tied head has a copy of its own where it is on another rank."""
    blocks = setting.counts.blocks
    stages = [sum(own_numbers(block, cut.tp) for block in blocks[first:last]) for first, last in cut.spans()]
    ranks = of_ranks(stages, cut.pp)
    if cut.pp > 1:
        ranks[-1] += setting.counts.tied / cut.tp
    return ranks


def memory(cut: Cut, setting: Setting, samples: float) -> Memory:
    """Of the fullest rank of a pipeline."""
    numbers = rank_numbers(cut, setting)
    ranks = [_of_rank(cut, setting, rank, numbers[rank], samples) for rank in range(cut.pp)]
    return max(ranks, key=lambda memory: memory.total)


def _of_rank(cut: Cut, setting: Setting, rank: int, numbers: float, samples: float) -> Memory:
    """While the passes of one micro batch run, what all others in flight keep is there."""
    again, spans, each = setting.job.checkpoint_activations, cut.spans(), parts(setting, samples, cut.tp)
    own = spans[rank :: cut.pp]
    whole = passed = waiting = during = 0.0
    for stage, (first, last) in zip(range(rank, len(spans), cut.pp), own, strict=True):
        flying = schedule.in_flight(cut.schedule, stage, cut.pp, len(spans), cut.count)
        whole += activations(each[first:last], again, flying)
        passed += _passed(cut, setting, each, first, last)
        lasting = _lasting(each, again, first, last)
        waiting += flying * lasting
        during = max(during, passing(each[first:last], again, None).others - each[first].entering - lasting)
    of = held(numbers, setting, 2 if cut.sharded else 0, cut.dp if cut.sharded else 1)
    held_blocks = [block for first, last in own for block in setting.counts.blocks[first:last]]
    versions = -(-(cut.pp - 1 - rank) // cut.count) if cut.versions else 0
    room = buffers(held_blocks) + versions * of.parameters + cut.buffered * of.gradients
    update = updating(setting.optimizer, held_blocks, 1 / cut.tp)
    most = fullest(of, Moment(0.0, waiting + during), room + passed, update, in_place=True)
    return Memory(of.parameters, of.gradients, of.optimizer, whole, room, most)


def _lasting(each: Sequence[Sizes], checkpointed: bool, first: int, last: int) -> float:
    """What a stage keeps of a micro batch that waits for its backward pass, beside its input; its output too."""
    output = 0.0
    if last < len(each) and (checkpointed or each[last].entering):
        output = each[last - 1].leaving
    if checkpointed:
        return output + sum(block.leaving for block in each[first : last - 1])
    return output + sum(block.kept for block in each[first:last]) - each[first].entering


def _passed(cut: Cut, setting: Setting, each: Sequence[Sizes], first: int, last: int) -> float:
    """What a stage receives, for every micro batch: its inputs and the gradients of its outputs. Torch makes room for
    all of it once. The ends have the batch."""
    ahead = each[first - 1].leaving if first else 0.0
    back = each[last - 1].leaving if last < len(each) else 0.0
    end = first == 0 or last == len(each)
    return cut.count * (ahead + back) + (batch(setting.job, setting.job.replica_batch(cut.dp), 0.0) if end else 0.0)
