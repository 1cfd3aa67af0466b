"""Series of published measurements with at least three GPU counts: what the smaller counts say of the largest one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.learned import learn
from ddlbench.predict.grading.grade import predicted_s
from ddlbench.predict.grading.points import Point
from ddlbench.results.rows import group_by


class Last(NamedTuple):
    """The point with the most GPUs of a series. learned_s: predicted seconds of its step, from all smaller counts;
    counts: these"""

    point: Point
    learned_s: float
    counts: tuple[int, ...]


def last_points(points: Sequence[Point]) -> Iterator[Last]:
    """The last point of each series of at least three GPU counts. points: the ones that can be predicted"""

    def series(point: Point) -> tuple[object, ...]:
        return point.source, point.gpu, point.network, point.framework, point.words, point.base

    for group in group_by(points, series).values():
        *smaller, last = sorted(group, key=lambda point: point.measured.gpus)
        smaller = [point for point in smaller if last.base.gpus < point.measured.gpus < last.measured.gpus]
        if smaller:
            yield Last(last, _learned_s(smaller, last), tuple(point.measured.gpus for point in smaller))


def _learned_s(smaller: Sequence[Point], last: Point) -> float:
    def predicted(machine: Machine) -> list[float]:
        return [predicted_s(point, machine) for point in smaller]

    learned = learn(last.machine, predicted, [point.measured.seconds for point in smaller])
    return learned.rest * predicted_s(last, learned.machine)
