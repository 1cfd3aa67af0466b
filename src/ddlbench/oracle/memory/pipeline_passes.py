"""The bytes of one rank of a pipeline of torch.distributed.pipelining, pass by pass in the order of its schedule.

A stage keeps the output of each micro batch beside what autograd keeps, until its backward pass is done
(`PipelineStage.fwd_cache`): on the last stage the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddlbench.oracle.memory.memory import Sizes
from ddlbench.oracle.memory.peak import Moment, passes
from ddlbench.oracle.timing.schedule import INPUTS, WEIGHTS, B, F, Op


@dataclass(frozen=True)
class Halves:
    """A backward pass in two halves: gradients of inputs first, of weights later.

    inputs, weights: the most that lives during each, what is kept included; between: what stays from one to the other;
    after: the gradient of the stage's input, which stays until the next step
    """

    inputs: float
    between: float
    weights: float
    after: float


@dataclass(frozen=True)
class StageBytes:
    """One micro batch on one stage, beyond its input and what it receives, which has memory of its own.

    kept: from the forward to the backward pass; ahead, back: the most that lives during them, `kept` included in back;
    first: during the first backward pass of a step, whose gradients arrive meanwhile; gradients: all of the stage
    returned: the gradient of its input, which is there until the next one is
    """

    kept: float
    ahead: float
    first: Moment
    back: float
    gradients: float
    returned: float = 0.0
    halves: Halves | None = None


def stage_bytes(blocks: Sequence[Sizes], checkpointed: bool, gradients: Sequence[float], ends: bool) -> StageBytes:
    """Of consecutive blocks. gradients: bytes of each block's; ends: whether it is the last stage, with the loss"""
    entering = blocks[0].entering  # kept by the first block, and there anyway
    own = [blocks[0]._replace(entering=0.0, kept=max(0.0, blocks[0].kept - entering)), *blocks[1:]]
    output = own[-1].leaving if checkpointed else own[-1].lingering
    kept = sum(block.leaving for block in own[:-1]) + own[-1].loss * ends if checkpointed else total(own)
    first, later = passes(own, checkpointed, gradients), passes(own, checkpointed, None)
    return StageBytes(
        kept + output,
        later.ahead.others,
        Moment(first.back.gradients, first.back.others + output),
        later.back.others + output,
        sum(gradients),
    )


def total(blocks: Iterable[Sizes]) -> float:
    return sum(block.kept for block in blocks)


def replay(ops: Iterable[Op], stages: Mapping[int, StageBytes]) -> Moment:
    """The fullest moment of a rank's passes. stages: those of the rank"""
    found, live = Moment(0.0, 0.0), 0.0
    arrived: set[int] = set()
    for kind, index, _ in ops:
        stage = stages[index]
        whole = sum(stages[each].gradients for each in arrived)
        if kind == F:
            found, live = _fuller(found, whole, live + stage.ahead), live + stage.kept
            continue
        if kind == INPUTS:
            if stage.halves is not None:  # the first stage has no gradient of its input: all of it comes later
                others = live - stage.kept
                found = _fuller(found, whole, others + stage.halves.inputs)
                live = others + stage.halves.between + stage.halves.after
            continue
        assert kind in (B, WEIGHTS)
        if kind == WEIGHTS and stage.halves is not None:
            live -= stage.halves.between
            whole += 0.0 if index in arrived else stage.gradients
            found = _fuller(found, whole, live + stage.halves.weights)
        else:
            live -= stage.kept
            during = Moment(0.0, stage.back) if index in arrived else stage.first
            found = _fuller(found, whole + during.gradients, live + during.others)
            live += 0.0 if index in arrived else stage.returned
        arrived.add(index)
    return found


def _fuller(found: Moment, gradients: float, others: float) -> Moment:
    return max(found, Moment(gradients, others), key=sum)
