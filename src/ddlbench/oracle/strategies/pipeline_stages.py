"""A pipeline's cut: which blocks each rank has, and the memory that they take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ddlbench.oracle.counts.halves import halves, split
from ddlbench.oracle.memory import pipedream as flight
from ddlbench.oracle.memory.memory import Sizes, activations, buffers, held, parts, smoothing
from ddlbench.oracle.memory.peak import batch, fullest, updating
from ddlbench.oracle.memory.pipedream import Flight
from ddlbench.oracle.memory.pipeline_passes import StageBytes, replay, stage_bytes
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.oracle.strategies.tensor import own_numbers
from ddlbench.oracle.timing import schedule


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
    """Memory of the fullest rank of a pipeline."""
    numbers = rank_numbers(cut, setting)
    ranks = [_of_rank(cut, setting, rank, numbers[rank], samples) for rank in range(cut.pp)]
    return max(ranks, key=lambda memory: memory.total)


def _of_rank(cut: Cut, setting: Setting, rank: int, numbers: float, samples: float) -> Memory:
    again, spans, each = setting.job.checkpoint_activations, cut.spans(), parts(setting, samples, cut.tp)
    own = list(zip(range(rank, len(spans), cut.pp), spans[rank :: cut.pp], strict=True))
    flying = {stage: schedule.in_flight(cut.schedule, stage, cut.pp, len(spans), cut.count) for stage, _ in own}
    whole = sum(activations(each[first:last], again, flying[stage]) for stage, (first, last) in own)
    of = held(numbers, setting, 3 if cut.sharded else 0, cut.dp if cut.sharded else 1)
    held_blocks = [block for _, (first, last) in own for block in setting.counts.blocks[first:last]]
    room = buffers(held_blocks)
    if rank in (0, (len(cut.sizes) - 1) % cut.pp):  # the ends have the batch
        room += batch(setting.job, setting.job.replica_batch(cut.dp), 0.0)
    update = updating(setting.optimizer, held_blocks, 1 / cut.tp)
    stages = {stage: _stage(cut, setting, each, stage, samples) for stage, _ in own}
    reduced = of.gradients if cut.dp > 1 else 0.0  # replicas average them in one piece, a copy
    if cut.sharded:  # weights are whole from one update to the next, and gradients until each block's are reduced
        room += 4.0 * numbers
        reduced = 4.0 * numbers - of.gradients + 4.0 * max(own_numbers(block, cut.tp) for block in held_blocks)
    if cut.versions:
        most = flight.fullest(of, stages[rank], _flight(cut, setting, each, rank), update, reduced, room)
    else:
        room += cut.count * sum(sum(messages(each, *span)) for _, span in own)
        ops = schedule.whole_order(cut.schedule, rank, cut.pp, len(spans), cut.count)
        left = sum(stage.halves.after for stage in stages.values() if stage.halves is not None)
        update = max(update, reduced) + cut.count * left
        most = fullest(of, replay(ops, stages), room, update, in_place=False)
    return Memory(of.parameters, of.gradients, of.optimizer, whole, room, most)


def _flight(cut: Cut, setting: Setting, each: Sequence[Sizes], rank: int) -> Flight:
    incoming, outgoing = messages(each, *cut.spans()[rank])
    inputs = 0.0 if rank else batch(setting.job, setting.job.replica_batch(cut.dp), 0.0)
    return Flight(cut.pp - 1 - rank, cut.count, cut.buffered, incoming, outgoing, inputs)


def _stage(cut: Cut, setting: Setting, each: Sequence[Sizes], stage: int, samples: float) -> StageBytes:
    first, last = cut.spans()[stage]
    numbers = [own_numbers(block, cut.tp) for block in setting.counts.blocks]
    if cut.pp > 1:
        numbers[-1] += setting.counts.tied / cut.tp
    own = each[first:last]
    if cut.versions and last == len(each):  # PipeDream keeps the loss, not the logits
        own = [*own[:-1], own[-1]._replace(lingering=0.0)]
    gradients = [4.0 * number for number in numbers[first:last]]
    found = stage_bytes(own, setting.job.checkpoint_activations, gradients, last == len(each))
    if cut.schedule == "1f1b":
        return replace(found, returned=messages(each, first, last)[0])
    if cut.schedule != "zero_bubble" or first == 0:
        return found
    output = 0.0 if last == len(each) else own[-1].lingering
    job, device = setting.job, setting.machine.device.type
    counted = split(job.model, job.precision, device, smoothing(setting), cut.tp)[first:last]
    splits = [block for block in counted if block is not None]
    return replace(found, halves=halves(splits, own, samples, output, messages(each, first, last)[0]))


def messages(each: Sequence[Sizes], first: int, last: int) -> tuple[float, float]:
    """Bytes of a stage's input and of its output for a micro batch, 0 at the ends. torch's schedules make room for the
    input and for the gradient of the output, of all micro batches once."""
    return each[first - 1].leaving if first else 0.0, each[last - 1].leaving if last < len(each) else 0.0
