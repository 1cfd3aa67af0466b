"""Learning curves over epochs and over time: top-1 for images, perplexity for text, never on one axis.

A line is the median of the repeats of one measurement after each epoch, a band is their range. A run that did not end
ok is a thin line of its own with a cross at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ddlbench.report import plotting
from ddlbench.report.looks import Look, Looks, looks_of, numbered
from ddlbench.report.merge import Row, group_by
from ddlbench.report.panels import Panel, curve_name, devices, settings, small_multiples

METRICS = {
    "accuracy": ("val_top1", "top-1 (% of validation samples)"),
    "perplexity": ("val_perplexity_token", "validation perplexity per token"),
}
UNITS = (("h", 3600.0), ("min", 60.0))
SQUASHED = 20  # a curve that falls by more than this factor has no visible end on a linear axis
FAILED_SHOWN = 8  # runs of a panel that did not end ok
MARKERS = 12  # of a line, about

Floats = np.ndarray[Any, np.dtype[np.float64]]
DrawPanel = Callable[[Axes, Panel], None]


@dataclass(frozen=True)
class Course:
    """One metric over the epochs: of the repeats of a measurement, or of one run (middle = low = high).

    epoch, elapsed_s: where the values stand; elapsed_s is the median of the repeats
    middle, low, high: the median of the repeats and their range
    """

    epoch: Floats
    elapsed_s: Floats
    middle: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Courses:
    """One metric of all measurements, by measurement.

    merged: of the runs that ended ok
    failed: of each other run
    """

    merged: dict[str, Course]
    failed: dict[str, list[Course]]

    def shown(self, rows: Sequence[Row]) -> list[tuple[Row, Course]]:
        """The merged courses of rows of scaling.csv."""
        return [(row, self.merged[row["measurement"]]) for row in rows if row["measurement"] in self.merged]

    def shown_failed(self, rows: Sequence[Row]) -> list[tuple[Row, Course]]:
        """The first few runs that did not end ok."""
        found = [(row, course) for row in rows for course in self.failed.get(row["measurement"], [])]
        return found[:FAILED_SHOWN]


def learning(
    epochs: pd.DataFrame, scaling: Sequence[Row], looks: Looks
) -> Iterator[tuple[str, list[Panel], DrawPanel]]:
    """Each metric by epoch and by time: its name, its panels and how a panel is drawn."""
    for name, (column, axis) in METRICS.items():
        known = epochs.dropna(subset=[column, "measurement"])
        for by, rows in (("epoch", known), ("time", known.dropna(subset=["elapsed_s"]))):
            shown = _panels(scaling, set(rows["measurement"]))
            curves = ((str(row["framework"]), _named(panel)(row)) for panel in shown for row in panel.rows)
            yield f"{name}_by_{by}", shown, _draw_panel(courses_of(rows, column), looks_of(curves, looks), axis, by)


def courses_of(epochs: pd.DataFrame, column: str) -> Courses:
    """Merge the repeats of each measurement, epoch by epoch."""
    plain = pd.DataFrame(
        {
            "measurement": epochs["measurement"].to_numpy(object),
            "path": epochs["path"].to_numpy(object),
            "epoch": epochs["epoch"].to_numpy("float64"),
            "elapsed_s": epochs["elapsed_s"].to_numpy("float64", na_value=np.nan),
            "value": epochs[column].to_numpy("float64"),
        }
    )
    ok = (epochs["status"] == "ok").to_numpy(bool)
    groups = plain[ok].groupby(["measurement", "epoch"], sort=True)
    merged = groups["value"].agg(["median", "min", "max"]).join(groups["elapsed_s"].median()).reset_index()
    failed: dict[str, list[Course]] = {}
    for key, run in plain[~ok].groupby(["measurement", "path"], sort=True):
        name, _ = cast(tuple[str, str], key)
        failed.setdefault(name, []).append(_course(cast(pd.DataFrame, run), "value", "value", "value"))
    named = merged.groupby("measurement", sort=False)
    return Courses(
        {str(name): _course(cast(pd.DataFrame, rows), "median", "min", "max") for name, rows in named}, failed
    )


def _course(rows: pd.DataFrame, *columns: str) -> Course:
    return Course(*(rows[name].to_numpy("float64") for name in ("epoch", "elapsed_s", *columns)))


def _panels(scaling: Sequence[Row], measured: set[str]) -> list[Panel]:
    """Comparable measurements of one model in a panel. A measurement that belongs to strong and to weak scaling is in
    the table twice; here once."""
    rows = list({row["measurement"]: row for row in scaling if row["measurement"] in measured}.values())
    told = settings(scaling)
    groups = group_by(rows, lambda row: (row["model"], row["comparison"])).values()
    whole = [Panel(str(own[0]["model"]), [told[own[0]["measurement"]], _shared_size(own)], "", own) for own in groups]
    return [part for panel in whole for part in small_multiples(panel, _named(panel))]


def _size(row: Row) -> str:
    return f"{devices(row['gpus'] or 0, row['device'])}, {row['global_batch'] or 'unknown'} samples an update"


def _shared_size(rows: Sequence[Row]) -> str:
    sizes = {_size(row) for row in rows}
    return sizes.pop() if len(sizes) == 1 else ""


def _named(panel: Panel) -> Callable[[Row], str]:
    """The name of a row's curve: with GPU count and batch where the panel does not tell them for all."""
    if panel.lines[1]:
        return curve_name
    batches = {(row["gpus"], row["global_batch"]) for row in panel.rows}
    several = len({gpus for gpus, _ in batches}) < len(batches)
    return lambda row: (
        f"{curve_name(row)}, {devices(row['gpus'] or 0, row['device'])}"
        + (f", batch {row['global_batch'] or 'unknown'}" if several else "")
    )


def _draw_panel(courses: Courses, looks: Looks, axis: str, by: str) -> DrawPanel:
    def draw_panel(axes: Axes, panel: Panel) -> None:
        name, own = _named(panel), _panel_looks(panel, looks)
        merged, failed = courses.shown(panel.rows), courses.shown_failed(panel.rows)
        unit = _time_axis(axes, [course for _, course in merged + failed]) if by == "time" else _epoch_axis(axes)
        for row, course in merged:
            _line(axes, course, unit, own[name(row)])
        for row, course in failed:
            _failed_line(axes, course, unit, own[name(row)])
        for text, look in own.items():
            axes.plot([], [], color=look.color, label=plotting.label(text), **_shape(look))
        plotting.value_name(axes, axis)
        _metric_axis(axes, axis, [float(end) for _, course in merged + failed for end in (*course.low, *course.high)])

    return draw_panel


def _panel_looks(panel: Panel, looks: Looks) -> dict[str, Look]:
    """By the name of the curve. The curves of a panel with one framework differ in colour too."""
    rows = [own[0] for own in group_by(panel.rows, _named(panel)).values()]
    keys = [(str(row["framework"]), _named(panel)(row)) for row in rows]
    alone = len({framework for framework, _ in keys}) == 1 < len(keys)
    return dict(zip((text for _, text in keys), numbered(len(keys)) if alone else looks.of(keys), strict=True))


def _epoch_axis(axes: Axes) -> float | None:
    axes.set_xlabel("epochs of training")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return None


def _time_axis(axes: Axes, courses: Sequence[Course]) -> float:
    """Returns the seconds of the axis's unit."""
    longest = max(float(course.elapsed_s.max()) for course in courses)
    unit, seconds = next(((unit, size) for unit, size in UNITS if longest >= 3 * size), ("s", 1.0))
    axes.set_xlabel(f"time since the first step, validation included ({unit})")
    return seconds


def _places(course: Course, unit: float | None) -> Floats:
    """unit: seconds of the time axis; None: an axis of epochs, counted from 1."""
    return course.epoch + 1 if unit is None else course.elapsed_s / unit


def _shape(look: Look) -> dict[str, Any]:
    return look.shape | {"markersize": 5, "markeredgewidth": 0.5, "linewidth": 1.2}


def _line(axes: Axes, course: Course, unit: float | None, look: Look) -> None:
    places = _places(course, unit)
    axes.plot(places, course.middle, color=look.color, markevery=len(places) // MARKERS + 1, **_shape(look))
    if (course.high > course.low).any():
        axes.fill_between(places, course.low, course.high, color=look.color, alpha=0.15, linewidth=0)


def _failed_line(axes: Axes, course: Course, unit: float | None, look: Look) -> None:
    places = _places(course, unit)
    axes.plot(places, course.middle, color=look.color, linewidth=0.8, alpha=0.7)
    axes.plot(places[-1], course.middle[-1], "x", color=look.color, markersize=8, markeredgewidth=1.8)


def _metric_axis(axes: Axes, label: str, values: list[float]) -> None:
    if label.startswith("top-1"):
        axes.yaxis.set_major_formatter(FuncFormatter(plotting.percent))
        return
    if values and max(values) > SQUASHED * min(values) > 0:
        axes.set_yscale("log")
        plotting.value_name(axes, f"{label} (log scale)")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(plotting.plain))
