"""--grade POINTS.csv: predictions of published measurements, and their errors. A point is predicted from its base, and
the largest GPU count of a series also from all smaller counts. --grade RESULTS: the same with own runs (`_grade_runs`).

An error is (predicted - measured) / measured seconds of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log2
from operator import attrgetter
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from ddlbench.config.compose import recorded_configuration
from ddlbench.config.schema import Config
from ddlbench.errors import RunError, Unsupported, UserError
from ddlbench.oracle import bands
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.measured.inputs import learn
from ddlbench.oracle.predictor import Inputs, predict, strategy
from ddlbench.oracle.runs import Results, from_devices, setting_of
from ddlbench.predict.grading import layouts
from ddlbench.predict.grading.points import COLUMNS, Point, Words, points
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.reading.published import CsvRow, read_csv
from ddlbench.results.rows import OWN, Row, group_by
from ddlbench.results.tables.measurement import Measurement, devices
from ddlbench.results.tables.run_rows import attempt_row
from ddlbench.results.tables.tables import make_tables
from ddlbench.texts import aligned, counted

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
            reasons = "; ".join(self.left_out[:3]) or "none has another number of GPUs than its base"
            raise UserError(f"no row can be graded: {reasons}")
        x, y = [log2(point["gpus"]) for point in self.points], [point["error"] for point in self.points]
        slope, interval = None, None  # of a straight line by least squares
        if len(set(x)) > 1:
            slope = float(np.polyfit(x, y, 1)[0])
            if len(x) > 2:
                half = Z95 * float(np.sqrt(np.polyfit(x, y, 1, cov=True)[1][0, 0]))
                interval = slope - half, slope + half
        by: dict[str, dict[str, dict[str, float]]] = {}
        for name in GROUPS:
            groups = group_by(self.points, lambda point, name=name: str(point[name]))
            by[name] = {value: error_statistics([p["error"] for p in same]) for value, same in groups.items()}
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
    return {**error_statistics([point["error"] for point in points]), **shares}


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


def predicted_s(point: Point, other: Machine | None = None) -> float:
    """Seconds of the point's step, from its base. RunError if the oracle refuses it, UserError if the network that the
    source states cannot have carried the gradients in the measured time.

    other: a machine instead of that of the source's words
    """
    machine = other or point.machine
    config = layouts.cached_configuration(f"+framework={point.framework}", *point.words)
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


def learned_rows(points: Sequence[Point], left_out: list[str]) -> Iterator[Row]:
    """The point with the most GPUs of each series of at least three GPU counts, predicted from all smaller counts.

    points: the ones that can be predicted; left_out: gets the reason where nothing can be learned
    """
    series = group_by(points, lambda p: (p.stated.source, p.stated.gpu, p.stated.network, p.framework, p.words, p.base))
    for group in series.values():
        *smaller, last = sorted(group, key=lambda point: point.measured.gpus)
        smaller = [point for point in smaller if last.base.gpus < point.measured.gpus < last.measured.gpus]
        if not smaller:
            continue
        try:
            learned = learn(
                last.machine,
                lambda machine, smaller=smaller: [predicted_s(point, machine) for point in smaller],
                [point.measured.seconds for point in smaller],
                smaller[-1].measured.gpus,
            )
            counts = ", ".join(str(point.measured.gpus) for point in smaller)
            yield last.graded(f"{counts} GPUs", learned.rest * predicted_s(last, learned.machine), learned=True)
        except RunError as error:  # slower links, which are tried, may not carry the messages of the base
            name = f"{last.stated.source}, {last.stated.model}"
            left_out.append(f"{name}, not learned from smaller counts: {error}")


def grade(path: Path, machine: Machine) -> Grade:
    """The grade of a file of either form, or of a folder of records of `machine`. UserError if it cannot be read or has
    other columns."""
    if path.is_dir():
        return _grade_runs(path, machine)
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
        base = f"{counted(point.base.gpus, 'GPU')}, {point.base.samples} samples, {point.base.seconds * 1e3:.4g} ms"
        try:
            graded.append(point.graded(base, predicted_s(point)))
            predictable.append(point)
        except RunError as error:
            left_out.append(f"line {point.stated.line}: {point.stated.source}, {point.stated.model}: {error}")
    return Grade(graded, left_out, learned=list(learned_rows(predictable, left_out)))


def _grade_runs(folder: Path, machine: Machine) -> Grade:
    """The largest measurement of each curve with at least three numbers of devices, predicted from the fewest devices
    and from all smaller numbers. UserError without such a curve."""
    records, pairs, left_out = read_all([folder]), list[list[Row]](), list[str]()
    rows = [row for row in make_tables(records).measurements if row["origin"] == OWN and row["mode"] == "train"]
    timed = [row for row in rows if row["status"] == "ok" and row["sample_time_s"] and row["gpus"]]
    curves = group_by(timed, lambda row: (row.series, row.curve)).values()
    curves = [curve for curve in curves if len({row["gpus"] for row in curve}) > 2]
    if not curves:
        raise UserError(
            f"no run of {folder} can be graded: no framework has complete runs with the same settings on three numbers "
            "of devices: start those that are missing"
        )
    for number, curve in enumerate(curves, 1):
        *_, last = sorted(curve, key=lambda row: row["gpus"])
        smaller = [row for row in curve if row["gpus"] < last["gpus"]]
        stated = Words(number, folder.name, str(last["model"]), last.curve, machine.device.name, "")
        paths = {run["path"] for row in smaller for run in row.runs}
        results = Results(folder, [*map(attempt_row, records.named(paths).values())])
        counts = sorted({row["gpus"] for row in smaller})
        try:
            if last["nodes"] not in (None, machine.nodes(last["gpus"])):
                raise Unsupported(f"{last['nodes']} nodes of cluster {machine.name} have another number of devices")
            (attempt,) = records.named([last.runs[0]["path"]]).values()
            config = recorded_configuration(attempt.record["config"])
            pairs.append(_graded_run(stated, last, config, results, counts, machine))
        except RunError as error:
            left_out.append(f"{last['framework']}, {last['model']}, {last.devices}: {error}")
    return Grade([one for one, _ in pairs], left_out, learned=[learned for _, learned in pairs])


def _graded_run(
    stated: Words, last: Measurement, config: Config, results: Results, counts: Sequence[int], machine: Machine
) -> list[Row]:
    """The two predictions of a run. counts: the smaller numbers of devices, whose runs are `results`"""
    learned = results.learned(config, machine)
    if learned is None:
        raise Unsupported("no smaller run of it can be a base")
    gpus, device, graded = last["gpus"], last["device"], list[Row]()
    measured_s = last.busy_step_s(last["sample_time_s"])
    all_counts = " and ".join((", ".join(map(str, counts[:-1])), devices(counts[-1], device)))
    for base, on, terms in ((devices(counts[0], device), machine, None), (all_counts, learned.machine, learned)):
        row = predict(config, gpus, Inputs(on, partial(results.computation, machine=on), learned=terms))
        if row.step_s is None:
            raise Unsupported(row.reason)
        band = bands.band(row.step_s, row.framework, on.nodes(gpus), on.device.type, terms is not None)
        graded.append(stated.graded(gpus, base, measured_s, row.step_s, band))
    return graded


def _grade_layouts(rows: Sequence[CsvRow], left_out: list[str]) -> Grade:
    tried = list(layouts.layouts(rows, left_out))
    predicted = list(map(layouts.predicted_s, tried))
    graded = list[Row]()
    for layout, seconds in zip(tried, predicted, strict=True):
        nodes, model = -(-layout.gpus // layouts.PER_NODE), f"GPT {layout.layers} layers, width {layout.hidden}"
        network = layouts.NETWORK if nodes > 1 else ""
        stated = Words(layout.line, "GPT layouts", model, layout.name, "A100", network)
        band = bands.band(seconds, "hybrid", nodes)
        graded.append(stated.graded(layout.gpus, "kernels of an A100", layout.measured_s, seconds, band))
    return Grade(graded, left_out, _regret(tried, predicted), _regret(tried, list(map(layouts.planned_s, tried))))


def _regret(tried: Sequence[layouts.Layout], predicted: Sequence[float | None]) -> list[float]:
    """The regret of each case with several layouts, if the layout with the fewest predicted seconds is recommended.
    predicted: seconds of each layout; None: it is refused"""
    both = zip(predicted, tried, strict=True)
    # A planner chooses among layouts of which all these are equal.
    case_of = attrgetter("gpus", "global_batch", "hidden", "layers", "seq_len")
    seconds = [(case_of(layout), one, layout.measured_s) for one, layout in both if one is not None]
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
    lines = list[list[str]]()
    for point in grade.points:
        stated = [str(point[key]) for key in ("line", "source", "model", "strategy", "gpu", "gpus", "base")]
        times = [f"{point[key] * 1e3:.4g} ms" for key in ("measured_s", "predicted_s")]
        lines.append([*stated, *times, f"{point['error']:+.1%}"])
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
        ends = " ({:+.2%} to {:+.2%})".format(*summary["slope_interval_95"]) if summary["slope_interval_95"] else ""
        print(f"error per doubling of the GPUs: {summary['slope_per_doubling']:+.2%}{ends}")
    print(f"measured within the band of 80 %: {summary['coverage_80']:.0%}, of 95 %: {summary['coverage_95']:.0%}")
    if learned := summary["learned"]:
        print(
            f"largest GPU count of {learned['rows']} series, learned from all smaller ones: mean error "
            f"{learned['mean_error']:.1%}, median {learned['median_error']:.1%}"
        )
    for what, cases in (("recommended layout", grade.regret), ("layout that --plan recommends", grade.planned_regret)):
        if cases:
            print(f"regret of the {what}: {mean(cases):.1%} (mean of {len(cases)} cases)")
