"""--grade POINTS.csv: predictions of published measurements, and their errors.

An error is (predicted - measured) / measured seconds of a step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import log2
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from ddlbench.errors import RunError, UserError
from ddlbench.oracle import bands
from ddlbench.predict.grading import layouts
from ddlbench.predict.grading.points import COLUMNS, Point, Words, points
from ddlbench.predict.grading.predictions import last_points, predicted_s
from ddlbench.results.reading.csv_rows import CsvRow, read_csv
from ddlbench.results.rows import group_by
from ddlbench.texts import aligned

Z95 = 1.96  # normal quantile of a 95 % interval
GROUPS = ("source", "model", "strategy", "gpu", "network", "gpus")


@dataclass(frozen=True)
class Graded:
    """One measurement, its base and its prediction. low, high: the ends of the bands of 80 and 95 %, in seconds"""

    stated: Words
    gpus: int
    base: str
    measured_s: float
    predicted_s: float
    error: float
    low_80_s: float
    high_80_s: float
    low_95_s: float
    high_95_s: float

    def row(self) -> dict[str, Any]:
        """Its values by name."""
        values = asdict(self)
        return {**values.pop("stated")._asdict(), **values}


@dataclass(frozen=True)
class Grade:
    """regret: measured seconds of the recommended layout over those of the best one, minus 1, of each case with more
    than one layout; learned: the largest GPU count of each series of at least three, predicted from all smaller ones"""

    points: list[Graded]
    left_out: list[str]
    regret: list[float] = field(default_factory=list[float])
    learned: list[Graded] = field(default_factory=list[Graded])

    def summary(self) -> dict[str, Any]:
        """docs/oracle.md explains the keys. UserError without a point."""
        if not self.points:
            raise UserError(f"no row can be graded: {'; '.join(self.left_out[:3]) or 'the file has no rows'}")
        errors = [point.error for point in self.points]
        slope, interval = _slope([log2(point.gpus) for point in self.points], errors)
        of_learned = [point.error for point in self.learned]
        learned = {**error_statistics(of_learned), **_coverage(self.learned)} if of_learned else None
        by: dict[str, dict[str, dict[str, float]]] = {}
        for name in GROUPS:
            groups = group_by(self.points, lambda point, name=name: str(point.row()[name]))
            by[name] = {value: error_statistics([point.error for point in points]) for value, points in groups.items()}
        return {
            **error_statistics(errors),
            "slope_per_doubling": slope,
            "slope_interval_95": interval,
            **_coverage(self.points),
            "learned": learned,
            "regret": mean(self.regret) if self.regret else None,
            "by": by,
        }


def _coverage(points: Sequence[Graded]) -> dict[str, float]:
    """The shares of points within their bands of 80 and 95 %."""
    return {
        "coverage_80": mean(p.low_80_s <= p.measured_s <= p.high_80_s for p in points),
        "coverage_95": mean(p.low_95_s <= p.measured_s <= p.high_95_s for p in points),
    }


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


def grade(path: Path) -> Grade:
    """The grade of a file of either form. UserError if it cannot be read or has other columns."""
    columns, rows, left_out = read_csv(path)
    if columns >= set(layouts.COLUMNS):
        return _grade_layouts(rows, left_out)
    if missing := sorted(set(COLUMNS) - columns):
        raise UserError(
            f"--grade {path}: missing columns: {', '.join(missing)}. A file has the columns "
            f"{', '.join(COLUMNS)}, or {', '.join(layouts.COLUMNS)}"
        )
    graded, kept = list[Graded](), list[Point]()
    for point in points(rows):
        if isinstance(point, str):
            left_out.append(point)
            continue
        try:
            predicted = predicted_s(point)
        except RunError as error:
            left_out.append(f"line {point.stated.line}: {point.stated.source}, {point.stated.model}: {error}")
            continue
        kept.append(point)
        base = f"{point.base.gpus} GPUs, {point.base.samples} samples, {point.base.seconds * 1e3:.4g} ms"
        graded.append(_graded_point(point, base, predicted))
    learned = [
        _graded_point(last.point, f"{', '.join(map(str, last.counts))} GPUs", last.learned_s, learned=True)
        for last in last_points(kept)
    ]
    return Grade(graded, left_out, learned=learned)


def _graded_point(point: Point, base: str, predicted: float, learned: bool = False) -> Graded:
    gpus = point.measured.gpus
    band = bands.band(point.framework, point.machine.nodes(gpus), learned=learned)
    return _graded(point.stated, gpus, base, point.measured.seconds, predicted, band)


def _graded(stated: Words, gpus: int, base: str, measured: float, predicted: float, band: bands.Ends) -> Graded:
    error = predicted / measured - 1
    return Graded(stated, gpus, base, measured, predicted, error, **bands.around(predicted, band))


def _grade_layouts(rows: Sequence[CsvRow], left_out: list[str]) -> Grade:
    graded = list[Graded]()
    cases: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for layout in layouts.layouts(rows):
        if isinstance(layout, str):
            left_out.append(layout)
            continue
        nodes, model = -(-layout.gpus // layouts.PER_NODE), f"GPT {layout.layers} layers, width {layout.hidden}"
        network = layouts.NETWORK if nodes > 1 else ""
        stated = Words(layout.line, "GPT layouts", model, layout.name, "A100", network)
        predicted, band = layouts.predicted_s(layout), bands.band("hybrid", nodes)
        graded.append(_graded(stated, layout.gpus, "kernels of an A100", layout.measured_s, predicted, band))
        cases.setdefault(layout.case, []).append((predicted, layout.measured_s))
    regret = [
        min(case)[1] / min(measured for _, measured in case) - 1 for case in cases.values() if len(case) > 1
    ]  # the recommended layout is the one with the fewest predicted seconds
    return Grade(graded, left_out, regret)


def as_json(graded: Grade) -> str:
    summary = graded.summary()
    rows = {"points": graded.points, "learned_points": graded.learned}
    lists = {name: [point.row() for point in points] for name, points in rows.items()}
    return json.dumps({**summary, **lists, "left_out": graded.left_out}, indent=1)


def show(graded: Grade) -> None:
    """Print every point, the rows that are left out, and the summary."""
    summary = graded.summary()
    columns = ("line", "source", "model", "strategy", "GPU", "GPUs", "base", "measured", "predicted", "error")
    lines = (
        (
            *(str(cell) for cell in (*point.stated[:5], point.gpus, point.base)),
            *(f"{point.measured_s * 1e3:.4g} ms", f"{point.predicted_s * 1e3:.4g} ms", f"{point.error:+.1%}"),
        )
        for point in graded.points
    )
    print("\n".join(aligned(columns, lines, left=(*columns[1:5], "base"))))
    for point in graded.learned:
        stated = point.stated
        print(f"learned from {point.base}: {stated.source}, {stated.model}, {point.gpus} GPUs: {point.error:+.1%}")
    for reason in graded.left_out:
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
        print(f"regret of the recommended layout: {summary['regret']:.1%} (mean of {len(graded.regret)} cases)")
