"""Peak memory of a rank of a pipeline: saved activations of the micro batches in flight, and one that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.counts.counts import Block
from ddlbench.oracle.memory.passes import Moment, at_peak, passes
from ddlbench.oracle.setting import Memory
from ddlbench.oracle.timing.schedule import INPUTS, WEIGHTS, F, Op


@dataclass(frozen=True)
class Stage:
    """Bytes of one stage for one micro batch, without the messages that it receives.

    saved: activations and output, from the forward to the backward pass; running: the peak of both passes; first: the
    same for the first micro batch of a step, whose gradients arrive meanwhile; gradients: of all parameters
    waiting: gradients of the outputs of layers with weights, which zero bubble keeps until it computes the gradients of
        the weights
    """

    saved: float
    running: float
    first: Moment
    gradients: float
    waiting: float = 0.0


def stage(blocks: Sequence[Block], samples: float, checkpointed: bool, gradients: Sequence[float], last: bool) -> Stage:
    """Consecutive blocks. gradients: bytes of the gradients of each; last: the stage with the loss, which frees its
    output with the first pass of zero bubble's two backward passes"""
    output = blocks[-1].unsaved_output * samples
    saved = sum(block.output * samples if checkpointed else block.saved.at(samples) for block in blocks)
    first = passes(blocks, samples, checkpointed, gradients, accumulating=False)
    running = passes(blocks, samples, checkpointed, [0.0] * len(blocks), accumulating=True)
    waiting = samples * sum(block.weighted_outputs for block in blocks) - (output if last else 0.0)
    return Stage(saved + output, running.activations + output, first.plus(0.0, output), sum(gradients), waiting)


def schedule_peak(passes_: Iterable[Op], stages: Mapping[int, Stage]) -> Moment:
    """The fullest moment of the passes of one rank, in their order. stages: those of the rank"""
    peak, saved = Moment(0.0, 0.0), 0.0
    begun = set[int]()  # stages that have gradients
    for kind, index, _ in passes_:
        stage, gradients = stages[index], sum(stages[other].gradients for other in begun)
        waiting = stage.waiting if index else 0.0  # the first stage computes all its gradients in one pass
        if kind == F:
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


@dataclass(frozen=True)
class InFlight:
    """What PipeDream has in flight on one stage (frameworks/pipeline/pipedream_trainer.py).

    ahead: micro batches that wait for their backward pass, one for each later stage; count: micro batches of a
    minibatch; gradients: minibatches with gradients at once, 2 for 2BW; input_bytes: of a micro batch
    """

    ahead: int
    count: int
    gradients: int
    input_bytes: float


def pipedream_peak(
    states: Bytes, stage: Stage, in_flight: InFlight, messages: float, permanent: float, update: float
) -> Memory:
    """Each minibatch in flight has a version of the weights, and the update makes one more. messages: bytes of a micro
    batch's input and of its output's gradient; update: bytes of temporary results of the update"""
    waiting = in_flight.ahead * (stage.saved + in_flight.input_bytes) + messages
    versions = ceil(in_flight.ahead / in_flight.count)
    gradients = in_flight.gradients * states.gradients
    running = Moment(gradients, stage.running)
    if in_flight.count == in_flight.gradients == 1:
        running = stage.first
    passes_ = at_peak(states, [running.plus(0.0, waiting)], permanent + versions * states.parameters)
    versions += in_flight.ahead > 0
    update_ = at_peak(states, [Moment(gradients, waiting + update)], permanent + versions * states.parameters)
    return max(passes_, update_, key=lambda memory: memory.total)
