"""Predictions of published steps: from the base of a point, or the largest GPU count of a series from all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import OneStep
from ddlbench.oracle.measured.learned import learn
from ddlbench.oracle.measured.runs import from_devices, setting_of
from ddlbench.oracle.predictor import strategy
from ddlbench.predict.grading.points import Point, Step
from ddlbench.results.rows import group_by


def predicted_s(point: Point, machine: Machine | None = None) -> float:
    """Seconds of the point's step, from its base. RunError if the oracle refuses it, UserError if the network that the
    source states cannot have carried the gradients in the measured time.

    machine: instead of that of the source's words
    """
    machine, config, gpus = machine or point.machine, _config(point.framework, point.words), point.measured.gpus
    computation = from_devices(config, machine, point.base.gpus, _one_step(point.base), "the base")
    setting = setting_of(config, machine, gpus, _one_step(point.measured), computation)
    nodes = machine.nodes(gpus)
    if nodes > 1:
        sent = 2 * (nodes - 1) / nodes * setting.gradient_bytes * setting.counts.parameter_count
        least = sent / machine.links[1].bytes_per_s
        if least > point.measured.seconds:
            raise UserError(
                f"its network {point.stated.network!r} needs {least:.3g} s for the gradients alone, and a step took "
                f"{point.measured.seconds:.3g} s: another network was used"
            )
    return strategy(config.framework, setting).step_s


def _one_step(step: Step) -> OneStep:
    return OneStep(step.seconds, step.samples, step.micro)


@cache
def _config(framework: str, words: tuple[str, ...]) -> Config:
    return configuration(f"+framework={framework}", *words)


class Last(NamedTuple):
    """The point with the most GPUs of a series. learned_s: predicted seconds of its step, from all smaller counts;
    counts: these"""

    point: Point
    learned_s: float
    counts: tuple[int, ...]


def last_points(points: Sequence[Point]) -> Iterator[Last]:
    """The last point of each series of at least three GPU counts. points: the ones that can be predicted"""

    def series(point: Point) -> tuple[object, ...]:
        stated = point.stated
        return stated.source, stated.gpu, stated.network, point.framework, point.words, point.base

    for group in group_by(points, series).values():
        *smaller, last = sorted(group, key=lambda point: point.measured.gpus)
        smaller = [point for point in smaller if last.base.gpus < point.measured.gpus < last.measured.gpus]
        if smaller:
            yield Last(last, _learned_s(smaller, last), tuple(point.measured.gpus for point in smaller))


def _learned_s(smaller: Sequence[Point], last: Point) -> float:
    def predicted(machine: Machine) -> list[float]:
        return [predicted_s(point, machine) for point in smaller]

    measured = [point.measured.seconds for point in smaller]
    learned = learn(last.machine, predicted, measured, smaller[-1].measured.gpus)
    return learned.rest * predicted_s(last, learned.machine)
