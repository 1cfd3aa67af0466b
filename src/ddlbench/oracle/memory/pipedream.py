"""The bytes of one stage of PipeDream, whose pipeline stays full (frameworks/pipeline/flight.py, updates.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.memory.pipeline_passes import StageBytes
from ddlbench.oracle.setting import Memory


@dataclass(frozen=True)
class Flight:
    """One stage. depth: stages after it, which is how many micro batches are ahead of its backward passes

    count: micro batches of a minibatch; buffered: 2BW, which makes an update when the minibatch after the next begins
    incoming, outgoing: bytes of its input and its output for a micro batch, 0 where nothing passes; batch: of the
    inputs of a minibatch that each of those in flight keeps
    """

    depth: int
    count: int
    buffered: bool
    incoming: float
    outgoing: float
    batch: float

    @property
    def behind(self) -> int:
        """Minibatches in flight beside the newest."""
        return -(-self.depth // self.count)


class Phase(NamedTuple):
    """gradients: bytes; versions: sets of weights beside the newest; others: activations and messages."""

    gradients: float
    versions: int
    others: float


def phases(stage: StageBytes, flight: Flight, gradients: float, update: float, reduced: float = 0.0) -> Iterable[Phase]:
    """A forward pass, a backward pass, the average over replicas, an update. The gradient of an input lives until the
    next exchange with the stage before; the micro batch whose backward pass has just ended is there to the end."""
    waiting = flight.depth * (stage.kept + flight.incoming) + flight.behind * flight.batch + flight.incoming
    received = flight.incoming + flight.outgoing
    behind = flight.behind
    both = gradients * (2 if flight.buffered else 1)
    yield Phase(both, behind, waiting + received + flight.incoming + reduced)
    if flight.buffered:
        yield Phase(both, behind, waiting + flight.incoming + stage.ahead)
        yield Phase(both, behind, waiting + received + stage.back)
        yield Phase(both, behind + bool(flight.depth), waiting + update)
        return
    some = gradients if flight.count > 1 else 0.0
    yield Phase(some, behind, waiting + flight.incoming + stage.ahead)
    if flight.count > 1:
        yield Phase(some, behind, waiting + received + stage.back)
    yield Phase(stage.first.gradients, behind, waiting + received + stage.first.others)
    yield Phase(gradients, behind + bool(flight.depth), waiting + received + flight.incoming + update)


def fullest(of: Bytes, stage: StageBytes, flight: Flight, update: float, reduced: float, room: float) -> Memory:
    """room: other bytes that stay; update, reduced: copies that the update and the average over replicas make"""
    found = [
        Memory(of.parameters, phase.gradients, of.optimizer, phase.others, room + phase.versions * of.parameters)
        for phase in phases(stage, flight, of.gradients, update, reduced)
    ]
    return max(found, key=lambda memory: memory.total)
