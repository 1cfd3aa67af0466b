"""How a pipeline cuts a model into stages, and the peak memory of a rank: saved activations of the micro batches in
flight, and the activations of the micro batch that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from ddlbench.counts.counts import Block, Counts, Share
from ddlbench.frameworks.pipeline.schedules import V_SHAPED, in_flight, rank_of
from ddlbench.measure.formulas.memory_formula import FP32_BYTES, Bytes, bytes_of_parameter, data_parallel
from ddlbench.oracle.memory.replicas import Moment, at_peak, batch_bytes, counts_of_rank, passes, update_copies
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.oracle.timing import schedule
from ddlbench.oracle.timing.schedule import INPUTS, OVERLAPPED, WEIGHTS, F, Op
from ddlbench.recomputation import Plan, kept


@dataclass(frozen=True)
class Cut:
    """A job as a pipeline on dp x tp x pp ranks.

    sizes: the number of blocks of each stage; count: micro batches of a step; samples: of a micro batch
    sharded: whether the replicas share the update (ZeRO stage 3)
    buffered: gradients of two minibatches of PipeDream at once
    scattered: each of tp ranks sends a part to the next stage, which gathers the parts (Narayanan et al. 2021, section
        4.1)
    """

    setting: Setting
    schedule: str
    dp: int
    tp: int
    pp: int
    sizes: tuple[int, ...]
    count: int
    samples: float
    sharded: bool = False
    buffered: bool = False
    scattered: bool = False

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First and last block + 1 of each stage."""
        return list(pairwise([0, *accumulate(self.sizes)]))

    def rank_of(self, stage: int) -> int:
        return rank_of(stage, self.pp, self.schedule in V_SHAPED)

    @cached_property
    def plans(self) -> list[Plan]:
        """Which blocks of each stage run again."""
        plans, of_a_rank = list[Plan](), len(self.sizes) // self.pp
        for stage, span in enumerate(self.spans):
            waiting = in_flight(self.schedule, self.rank_of(stage), self.pp, self.count, of_a_rank)
            plans.append(self.setting.plan(self.samples, *span, waiting))
        return plans

    def of_ranks(self, stages: Sequence[float]) -> list[float]:
        """The sum over the stages of each rank."""
        sums = [0.0] * self.pp
        for stage, amount in enumerate(stages):
            sums[self.rank_of(stage)] += amount
        return sums

    @property
    def stage_ranks(self) -> int:
        """Ranks that have the same stages: the distance from a rank to the rank with the next stage."""
        return self.dp * self.tp

    @property
    def two_ends(self) -> bool:
        """Whether the first and the last stage are on two ranks: both read the batch, and a tied weight has a copy."""
        return self.pp > 1 and self.rank_of(len(self.sizes) - 1) != 0


def rank_parameters(cut: Cut) -> list[float]:
    """Parameters of each rank."""
    counts = cut.setting.counts
    blocks = [block.parameters_of_part(cut.tp) for block in counts.blocks]
    ranks = cut.of_ranks([sum(blocks[first:end]) for first, end in cut.spans])
    if cut.two_ends:
        ranks[-1] += counts.tied / cut.tp
    return ranks


@dataclass(frozen=True)
class Stage:
    """Bytes of one stage for one micro batch, without the messages that it receives.

    saved: activations and output, from the forward to the backward pass; running: the peak of both passes; first: the
        peak for the first micro batch of a step, whose gradients arrive meanwhile
    gradients: of all parameters; waiting: gradients of the outputs of layers with weights, which zero bubble keeps
        until it computes the gradients of the weights
    """

    saved: float
    running: float
    first: Moment
    gradients: float
    waiting: float = 0.0


def stage(blocks: Sequence[Block], samples: float, plan: Plan, gradients: Sequence[float], last: bool) -> Stage:
    """The memory of a stage of these consecutive blocks.

    plan: which of them run again; gradients: bytes of the gradients of each block
    last: whether the stage has the loss: it frees its output in the first of zero bubble's two backward passes
    """
    output = blocks[-1].unsaved_output * samples
    saved = kept(plan, [block.link(samples) for block in blocks])[-1]
    if not isinstance(plan[-1], int):  # rehearsals have an output after a segment once more
        saved += output
    first = passes(blocks, samples, plan, gradients, accumulating=False)
    running = passes(blocks, samples, plan, [0.0] * len(blocks), accumulating=True)
    waiting = samples * sum(block.weighted_outputs for block in blocks) - (output if last else 0.0)
    return Stage(saved + output, running.activations + output, first.plus(0.0, output), sum(gradients), waiting)


def schedule_peak(passes_: Iterable[Op], stages: Mapping[int, Stage]) -> Moment:
    """The moment of a step with the most bytes on one rank.

    passes_: of the rank, in their order; stages: of the rank, by index
    """
    peak, saved = Moment(0.0, 0.0), 0.0
    begun = set[int]()  # stages that have gradients
    for kind, index, _ in passes_:
        stage, gradients = stages[index], sum(stages[other].gradients for other in begun)
        waiting = stage.waiting if index else 0.0  # the first stage computes all its gradients in one pass
        if kind in (F, OVERLAPPED):
            moment = Moment(gradients, saved + stage.running)
            saved += stage.saved
        elif kind == WEIGHTS:
            moment = Moment(gradients, saved)
            saved -= stage.saved + waiting
        else:
            running = Moment(0.0, stage.running) if index in begun else stage.first
            kept = waiting if kind == INPUTS else 0.0
            moment = running.plus(gradients, saved - stage.saved + kept)
            saved += kept - (0.0 if kind == INPUTS else stage.saved)
            begun.add(index)
        peak = max(peak, moment, key=sum)
    return peak


def pipedream_peak(
    cut: Cut, rank: int, states: Bytes, stage: Stage, messages: float, permanent: float, update: float
) -> Memory:
    """The memory of one stage of PipeDream (frameworks/pipeline/pipedream_trainer.py). Each minibatch in flight has a
    version of the weights, and the update makes one more version. PipeDream-2BW has gradients of two minibatches at
    once.

    messages: bytes of a micro batch's input and of its output's gradient
    update: bytes of temporary results of the update
    """
    ahead = cut.pp - 1 - rank  # micro batches that wait for their backward pass, one for each later stage
    first, _ = cut.spans[rank]
    received = cut.setting.counts.blocks[first - 1].output * cut.samples if first else 0.0
    waiting = ahead * (stage.saved + received) + messages
    versions = ceil(ahead / cut.count)
    gradients = (2 if cut.buffered else 1) * states.gradients
    running = stage.first if cut.count == 1 and not cut.buffered else Moment(gradients, stage.running)
    passes_ = at_peak(states, [running.plus(0.0, waiting)], permanent + versions * states.parameters)
    versions += ahead > 0
    update_ = at_peak(states, [Moment(gradients, waiting + update)], permanent + versions * states.parameters)
    return max(passes_, update_, key=lambda memory: memory.total)


def memory(cut: Cut) -> Memory:
    """Memory of the fullest rank of a pipeline."""
    counts = counts_of_rank(cut.setting, Share(cut.tp))
    ranks = [_of_rank(cut, counts, rank, parameters) for rank, parameters in enumerate(rank_parameters(cut))]
    return max(ranks, key=lambda memory: memory.total)


def _of_rank(cut: Cut, counts: Counts, rank: int, parameters: float) -> Memory:
    """The memory of one rank.

    counts: of one of the ranks that share each stage; parameters: of this rank
    """
    setting, edges, samples = cut.setting, cut.spans, cut.samples
    spans = {index: span for index, span in enumerate(edges) if cut.rank_of(index) == rank}
    blocks = [block for first, end in spans.values() for block in counts.blocks[first:end]]
    gradients = [FP32_BYTES * float(block.parameter_count) for block in counts.blocks]
    if cut.pp > 1:  # on one rank the last stage has the gradient of a tied weight first, and the first one adds to it
        gradients[-1] += FP32_BYTES * counts.tied
        gradients[0] -= 0.0 if cut.two_ends else FP32_BYTES * counts.tied
    plans = cut.plans
    stages = {
        index: stage(counts.blocks[first:end], samples, plans[index], gradients[first:end], end == len(gradients))
        for index, (first, end) in spans.items()
    }
    tied = [counts.tied] if cut.two_ends and rank == cut.pp - 1 else []
    shards = cut.dp if cut.sharded else 1
    sizes = [*(ceil(size / shards) for block in blocks for size in block.tensor_sizes), *tied]
    of_parameter = bytes_of_parameter(setting.computation.optimizer, sizes=sizes)
    states = data_parallel(int(parameters), of_parameter, 3 if cut.sharded else 0, cut.dp)
    copies = update_copies(setting.computation.optimizer, blocks)
    permanent = float(sum(block.buffers for block in blocks))
    if cut.dp > 1:
        copies = max(copies, states.gradients)  # replicas average a copy of all gradients
    if rank in (0, cut.rank_of(len(edges) - 1)):  # the first and the last stage have the batch
        permanent += batch_bytes(setting.job, setting.job.replica_batch(cut.dp))
    # The inputs of the stages and the gradients of their outputs.
    borders = [edge for span in spans.values() for edge in span if 0 < edge < len(counts.blocks)]
    messages = samples * sum(counts.blocks[edge - 1].output for edge in borders)
    if cut.schedule == "pipedream":
        return pipedream_peak(cut, rank, states, stages[rank], messages, permanent, copies)
    if cut.sharded:  # complete weights from one update to the next, and gradients until they are reduced
        permanent += FP32_BYTES * parameters
        copies = FP32_BYTES * parameters
    order = schedule.order(cut.schedule, rank, cut.pp, len(edges), cut.count)
    moments = schedule_peak(order, stages), Moment(states.gradients, copies)
    return at_peak(states, moments, permanent + cut.count * messages)  # torch has buffers for all micro batches
