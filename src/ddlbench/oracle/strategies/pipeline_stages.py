"""A pipeline's cut: which blocks each rank has, and the memory that they take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ddlbench.measure.formulas.memory_formula import FP32_BYTES, data_parallel, in_fp32
from ddlbench.oracle.counts.counts import Counts
from ddlbench.oracle.memory.passes import Moment, at_peak, batch_bytes, buffer_bytes, counts_of_rank, update_copies
from ddlbench.oracle.memory.stages import InFlight, pipedream_peak, schedule_peak, stage
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
    counts, numbers = counts_of_rank(setting, cut.tp), rank_numbers(cut, setting)
    ranks = [_of_rank(cut, setting, counts, rank, numbers[rank], samples) for rank in range(cut.pp)]
    return max(ranks, key=lambda memory: memory.total)


def _of_rank(cut: Cut, setting: Setting, counts: Counts, rank: int, numbers: float, samples: float) -> Memory:
    job, edges = setting.job, cut.spans()
    spans = {index: edges[index] for index in range(rank, len(edges), cut.pp)}
    blocks = [block for first, end in spans.values() for block in counts.blocks[first:end]]
    gradients = [FP32_BYTES * float(block.numbers) for block in counts.blocks]
    gradients[-1] += FP32_BYTES * counts.tied if cut.pp > 1 else 0.0
    stages = {
        index: stage(
            counts.blocks[first:end], samples, job.checkpoint_activations, gradients[first:end], end == len(gradients)
        )
        for index, (first, end) in spans.items()
    }
    states = data_parallel(int(numbers), in_fp32(setting.optimizer), 3 if cut.sharded else 0, cut.dp)
    copies, permanent = update_copies(setting.optimizer, blocks), buffer_bytes(blocks)
    if cut.dp > 1:
        copies = max(copies, states.gradients)  # replicas average a copy of all gradients
    if rank in (0, (len(edges) - 1) % cut.pp):  # the first and the last stage have the batch
        permanent += batch_bytes(job, job.replica_batch(cut.dp))
    # The inputs of the stages and the gradients of their outputs.
    borders = [edge for span in spans.values() for edge in span if 0 < edge < len(counts.blocks)]
    messages = samples * sum(counts.blocks[edge - 1].output for edge in borders)
    if cut.versions:
        before = counts.blocks[edges[rank][0] - 1].output * samples if rank else 0.0
        in_flight = InFlight(cut.pp - 1 - rank, cut.count, 2 if cut.buffered else 1, before)
        return pipedream_peak(states, stages[rank], in_flight, messages, permanent, copies)
    if cut.sharded:  # complete weights from one update to the next, and gradients until they are reduced
        permanent += FP32_BYTES * numbers
        copies = FP32_BYTES * numbers
    order = schedule.whole_order(cut.schedule, rank, cut.pp, len(edges), cut.count)
    moments = schedule_peak(order, stages), Moment(states.gradients, copies)
    return at_peak(states, moments, permanent + cut.count * messages)  # torch has buffers for all micro batches
