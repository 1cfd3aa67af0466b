"""--grade POINTS.csv: predictions of published measurements, and their errors: from the base of a point, or the largest
GPU count of a series from all others. --grade RESULTS: the same with own runs.

An error is (predicted - measured) / measured seconds of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import log2
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import RunError, UserError
from ddlbench.oracle import bands
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import learn
from ddlbench.oracle.predictor import strategy
from ddlbench.oracle.runs import from_devices, setting_of
from ddlbench.predict.grading import layouts, own_runs
from ddlbench.predict.grading.points import COLUMNS, Point, Words, points
from ddlbench.results.reading.csv_rows import CsvRow, read_csv
from ddlbench.results.rows import Row, group_by
from ddlbench.texts import aligned

Z95 = 1.96  # normal quantile of a 95 % interval
GROUPS = ("source", "model", "strategy", "gpu", "network", "gpus")


@dataclass(frozen=True)
class Grade:
    """Rows of measurements, their bases and predictions (`graded`).

    regret: measured seconds of the recommended layout over those of the best one, minus 1, of each case with more than
        one layout
    planned_regret: the same with the layout that --plan recommends, among those that it does not refuse
    learned: the largest GPU count of each series of at least three, predicted from all smaller ones
    """

    points: list[Row]
    left_out: list[str]
    regret: list[float] = field(default_factory=list[float])
    planned_regret: list[float] = field(default_factory=list[float])
    learned: list[Row] = field(default_factory=list[Row])

    def summary(self) -> dict[str, Any]:
        """docs/oracle.md explains the keys. UserError without a point."""
        if not self.points:
            raise UserError(f"no row can be graded: {'; '.join(self.left_out[:3]) or 'the file has no rows'}")
        slope, interval = _slope([log2(point["gpus"]) for point in self.points], _errors(self.points))
        by: dict[str, dict[str, dict[str, float]]] = {}
        for name in GROUPS:
            groups = group_by(self.points, lambda point, name=name: str(point[name]))
            by[name] = {value: error_statistics(_errors(points)) for value, points in groups.items()}
        return {
            **_statistics(self.points),
            "slope_per_doubling": slope,
            "slope_interval_95": interval,
            "learned": _statistics(self.learned) if self.learned else None,
            "regret": mean(self.regret) if self.regret else None,
            "planned_regret": mean(self.planned_regret) if self.planned_regret else None,
            "by": by,
        }


def _statistics(points: Sequence[Row]) -> dict[str, float]:
    """Statistics of the errors, and the shares of points within their bands of 80 and 95 %."""
    shares = {
        f"coverage_{level}": mean(p[f"low_{level}_s"] <= p["measured_s"] <= p[f"high_{level}_s"] for p in points)
        for level in (80, 95)
    }
    return {**error_statistics(_errors(points)), **shares}


def _errors(points: Sequence[Row]) -> list[float]:
    return [point["error"] for point in points]


def error_statistics(errors: Sequence[float]) -> dict[str, float]:
    """The number of points, and statistics of their errors (shares of the measured seconds)."""
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "mean_error": mean(sizes),
        "median_error": median(sizes),
        "within_10": mean(size <= 0.10 for size in sizes),
        "mean_signed_error": mean(errors),
    }


def _slope(x: Sequence[float], y: Sequence[float]) -> tuple[float | None, tuple[float, float] | None]:
    """The slope of a straight line by least squares, and its 95 % interval; None with fewer than two GPU counts."""
    if len(set(x)) < 2:
        return None, None
    if len(x) < 3:
        return float(np.polyfit(x, y, 1)[0]), None
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    half = Z95 * float(np.sqrt(covariance[0, 0]))
    return float(slope), (float(slope) - half, float(slope) + half)


def predicted_s(point: Point, other: Machine | None = None) -> float:
    """Seconds of the point's step, from its base. RunError if the oracle refuses it, UserError if the network that the
    source states cannot have carried the gradients in the measured time.

    other: a machine instead of that of the source's words
    """
    machine, config = other or point.machine, _config(point.framework, point.words)
    computation = from_devices(config, machine, point.base, "the base")
    setting = setting_of(config, machine, point.measured, computation)
    nodes = machine.nodes(point.measured.gpus)
    if nodes > 1 and machine is point.machine:
        sent = 2 * (nodes - 1) / nodes * setting.gradient_bytes * setting.counts.parameter_count
        least = sent / machine.links[1].bytes_per_s
        if least > point.measured.seconds:
            raise UserError(
                f"its network {point.stated.network!r} needs {least:.3g} s for the gradients alone, and a step took "
                f"{point.measured.seconds:.3g} s: another network was used"
            )
    return strategy(config.framework, setting).step_s


@cache
def _config(framework: str, words: tuple[str, ...]) -> Config:
    return configuration(f"+framework={framework}", *words)


def learned_rows(points: Sequence[Point], left_out: list[str]) -> Iterator[Row]:
    """The point with the most GPUs of each series of at least three GPU counts, predicted from all smaller counts.

    points: the ones that can be predicted; left_out: gets the reason where nothing can be learned
    """

    def series(point: Point) -> tuple[object, ...]:
        stated = point.stated
        return stated.source, stated.gpu, stated.network, point.framework, point.words, point.base

    for group in group_by(points, series).values():
        *smaller, last = sorted(group, key=lambda point: point.measured.gpus)
        smaller = [point for point in smaller if last.base.gpus < point.measured.gpus < last.measured.gpus]
        if smaller:
            try:
                counts = ", ".join(str(point.measured.gpus) for point in smaller)
                yield last.graded(f"{counts} GPUs", _learned_s(smaller, last), learned=True)
            except RunError as error:  # slower links, which are tried, may not carry the messages of the base
                name = f"{last.stated.source}, {last.stated.model}"
                left_out.append(f"{name}, not learned from smaller counts: {error}")


def _learned_s(smaller: Sequence[Point], last: Point) -> float:
    def predicted(machine: Machine) -> list[float]:
        return [predicted_s(point, machine) for point in smaller]

    measured = [point.measured.seconds for point in smaller]
    learned = learn(last.machine, predicted, measured, smaller[-1].measured.gpus)
    return learned.rest * predicted_s(last, learned.machine)


def grade(path: Path, machine: Machine) -> Grade:
    """The grade of a file of either form, or of a folder of records of `machine`. UserError if it cannot be read or has
    other columns."""
    left_out = list[str]()
    if path.is_dir():
        pairs = list(own_runs.graded_runs(path, machine, left_out))
        return Grade([alone for alone, _ in pairs], left_out, learned=[learned for _, learned in pairs])
    columns, rows, left_out = read_csv(path)
    if columns >= set(layouts.COLUMNS):
        return _grade_layouts(rows, left_out)
    if missing := sorted(set(COLUMNS) - columns):
        raise UserError(
            f"--grade {path}: missing columns: {', '.join(missing)}. A file has the columns "
            f"{', '.join(COLUMNS)}, or {', '.join(layouts.COLUMNS)}"
        )
    graded, predictable = list[Row](), list[Point]()
    for point in points(rows, left_out):
        base = f"{point.base.gpus} GPUs, {point.base.samples} samples, {point.base.seconds * 1e3:.4g} ms"
        try:
            graded.append(point.graded(base, predicted_s(point)))
            predictable.append(point)
        except RunError as error:
            left_out.append(f"line {point.stated.line}: {point.stated.source}, {point.stated.model}: {error}")
    return Grade(graded, left_out, learned=list(learned_rows(predictable, left_out)))


def _grade_layouts(rows: Sequence[CsvRow], left_out: list[str]) -> Grade:
    tried = list(layouts.layouts(rows, left_out))
    predicted = list(map(layouts.predicted_s, tried))
    graded = list[Row]()
    for layout, seconds in zip(tried, predicted, strict=True):
        nodes, model = -(-layout.gpus // layouts.PER_NODE), f"GPT {layout.layers} layers, width {layout.hidden}"
        network = layouts.NETWORK if nodes > 1 else ""
        stated = Words(layout.line, "GPT layouts", model, layout.name, "A100", network)
        band = bands.band("hybrid", nodes)
        graded.append(stated.graded(layout.gpus, "kernels of an A100", layout.measured_s, seconds, band))
    return Grade(graded, left_out, _regret(tried, predicted), _regret(tried, list(map(layouts.planned_s, tried))))


def _regret(tried: Sequence[layouts.Layout], predicted: Sequence[float | None]) -> list[float]:
    """Of each case with several layouts: the one with the fewest predicted seconds is recommended. predicted: None: the
    layout is refused"""
    both = zip(predicted, tried, strict=True)
    seconds = [(layout.case, one, layout.measured_s) for one, layout in both if one is not None]
    cases = group_by(seconds, lambda row: row[0]).values()
    return [min(case)[2] / min(measured for *_, measured in case) - 1 for case in cases if len(case) > 1]


def show(grade: Grade, as_json: bool) -> None:
    """Print every point, the rows that are left out, and the summary."""
    summary = grade.summary()
    if as_json:
        lists = {"points": grade.points, "learned_points": grade.learned, "left_out": grade.left_out}
        print(json.dumps({**summary, **lists}, indent=1))
        return
    columns = ("line", "source", "model", "strategy", "GPU", "GPUs", "base", "measured", "predicted", "error")
    lines = (
        (
            *(str(point[key]) for key in ("line", "source", "model", "strategy", "gpu", "gpus", "base")),
            *(f"{point[key] * 1e3:.4g} ms" for key in ("measured_s", "predicted_s")),
            f"{point['error']:+.1%}",
        )
        for point in grade.points
    )
    print("\n".join(aligned(columns, lines, left=(*columns[1:5], "base"))))
    for point in grade.learned:
        where = f"{point['source']}, {point['model']}, {point['strategy']}, {point['gpus']} GPUs"
        print(f"learned from {point['base']}: {where}: {point['error']:+.1%}")
    for reason in grade.left_out:
        print(f"left out: {reason}")
    print(
        f"\n{summary['rows']} rows: mean error {summary['mean_error']:.1%}, median {summary['median_error']:.1%}, "
        f"within 10 %: {summary['within_10']:.0%}, mean of signed errors {summary['mean_signed_error']:+.1%}"
    )
    if summary["slope_per_doubling"] is not None:
        low, high = summary["slope_interval_95"] or (float("nan"), float("nan"))
        print(f"error per doubling of the GPUs: {summary['slope_per_doubling']:+.2%} ({low:+.2%} to {high:+.2%})")
    print(f"measured within the band of 80 %: {summary['coverage_80']:.0%}, of 95 %: {summary['coverage_95']:.0%}")
    if learned := summary["learned"]:
        print(
            f"largest GPU count of {learned['rows']} series, learned from all smaller ones: mean error "
            f"{learned['mean_error']:.1%}, median {learned['median_error']:.1%}"
        )
    if summary["regret"] is not None:
        print(f"regret of the recommended layout: {summary['regret']:.1%} (mean of {len(grade.regret)} cases)")
    if summary["planned_regret"] is not None:
        cases = len(grade.planned_regret)
        print(f"regret of the layout that --plan recommends: {summary['planned_regret']:.1%} (mean of {cases} cases)")
