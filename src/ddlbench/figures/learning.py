"""Learning curves over epochs and over time: top-1 for images, perplexity for text, never on one axis.

A line is the median over the seeds of runs that are otherwise equal, a band is their range, a darker band the interval
of the median from six seeds on. Repeats of one seed count once; where there is one seed alone the band is their range.
A run that did not end ok is a thin line of its own with a cross at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ddlbench.figures import plotting
from ddlbench.figures.epoch_series import Course, Courses, Floats, courses_of
from ddlbench.figures.panels import Panel, panel_texts, small_multiples
from ddlbench.figures.styles import Look, Looks, looks_of, numbered
from ddlbench.results.rows import group_by
from ddlbench.results.tables.measurement import Measurement


class Metric(NamedTuple):
    """A metric of epochs.csv. label: of its axis; share: whether it is a share, shown in percent"""

    column: str
    label: str
    share: bool = False


METRICS = {
    "accuracy": Metric("val_top1", "top-1 (% of validation samples)", share=True),
    "perplexity": Metric("val_perplexity_token", "validation perplexity per token"),
}
KEYS = ["path", "measurement", "status", "epoch", "elapsed_s"]  # columns of epochs.csv, beside a metric
UNITS = (("h", 3600.0), ("min", 60.0))
SQUASHED = 20  # a curve that falls by more than this factor has no visible end on a linear axis
MARKERS = 12  # of a line, about

DrawPanel = Callable[[Axes, Panel], None]


def learning(
    table: pd.DataFrame, epochs: pd.DataFrame, measurements: Sequence[Measurement], looks: Looks
) -> Iterator[tuple[str, list[Panel], DrawPanel]]:
    """The figures of each metric, by epoch and by time: name, panels and a function that draws a panel. table: of
    learning.csv"""
    of = {row["measurement"]: row["learning"] for row in measurements}
    most: Any = table.groupby("learning")["seeds"].max()
    seeds = {str(name): int(count) for name, count in most.items()}
    for name, metric in METRICS.items():
        needed = cast(pd.DataFrame, epochs[[*KEYS, metric.column]])
        measured = needed.dropna(subset=[metric.column, "measurement"])
        for by, place in (("epoch", "epoch"), ("time", "elapsed_s")):
            rows = measured.dropna(subset=[place])
            shown = _panels(measurements, set(rows["measurement"].unique()), seeds)
            courses = courses_of(table, rows, of, metric.column, [place])
            yield f"{name}_by_{by}", shown, _Drawn(metric, by, shown, courses, looks).draw


def _panels(measurements: Sequence[Measurement], measured: set[str], seeds: Mapping[str, int]) -> list[Panel]:
    """Comparable curves of one model in a panel. seeds: the number of each curve, by its column `learning`"""
    curves = group_by((row for row in measurements if row["measurement"] in measured), lambda row: row["learning"])
    rows = [next((row for row in curve if row["status"] == "ok"), curve[0]) for curve in curves.values()]
    texts = panel_texts(measurements, variant="learning_variant")
    shown: list[Panel] = []
    for group in group_by(rows, lambda row: (row.model, row["learning_comparison"])).values():
        sizes = {f"{row.devices}, {row['global_batch'] or 'unknown'} samples an update" for row in group}
        size = sizes.pop() if len(sizes) == 1 else ""
        lines = [texts[group[0]["measurement"]], size, _seeds(group, seeds)]
        panel = Panel(str(group[0].model), lines, "", group, one_size=bool(size))
        shown += small_multiples(panel, _named(panel))
    return shown


def _seeds(rows: Sequence[Measurement], seeds: Mapping[str, int]) -> str:
    """ "median and range of 3 seeds"; empty where every curve has one."""
    counts = sorted({seeds[row["learning"]] for row in rows if row["learning"] in seeds})
    if not counts or counts[-1] == 1:
        return ""
    fewest = f"{counts[0]} to " if counts[0] < counts[-1] else ""
    return f"median and range of {fewest}{counts[-1]} seeds"


def _named(panel: Panel) -> Callable[[Measurement], str]:
    """The name of a row's curve: with GPU count and batch where the panel does not show them for all."""
    if panel.one_size:
        return lambda row: row.curve
    batches = {(row["gpus"], row["global_batch"]) for row in panel.rows}
    several = len({gpus for gpus, _ in batches}) < len(batches)
    return lambda row: (
        f"{row.curve}, {row.devices}" + (f", batch {row['global_batch'] or 'unknown'}" if several else "")
    )


class _Drawn:
    """The panels of one figure: those of one model have equal axes, and a curve has one look in all of them."""

    def __init__(self, metric: Metric, by: str, shown: Sequence[Panel], courses: Courses, looks: Looks) -> None:
        """by: epoch | time; looks: of the report, whose colours are kept"""
        curves = {(row.curve_key[0], _named(panel)(row)) for panel in shown for row in panel.rows}
        self.metric, self.by, self.courses, self._looks = metric, by, courses, looks_of(curves, looks)
        self._own_legends = len(curves) > plotting.SHARED_LABELS or len({compared for compared, _ in curves}) == 1
        self._ends: dict[Any, _Ends] = {}
        for model, panels in group_by(shown, _model).items():
            drawn = [courses.shown(panel.rows) for panel in panels]
            self._ends[model] = _ends([course for part in drawn for _, course in (*part.merged, *part.failed)])

    def looks(self, panel: Panel) -> dict[str, Look]:
        """The look of each curve, by its name. If the panel has its legend to itself, and one value of the compared
        factor, its curves differ in colour, too."""
        rows = [curve[0] for curve in group_by(panel.rows, _named(panel)).values()]
        keys = [(row.curve_key[0], _named(panel)(row)) for row in rows]
        alone = self._own_legends and len({compared for compared, _ in keys}) == 1 < len(keys)
        looks = numbered(len(keys)) if alone else self._looks.of(keys)
        return dict(zip((text for _, text in keys), looks, strict=True))

    def draw(self, axes: Axes, panel: Panel) -> None:
        name, looks, ends = _named(panel), self.looks(panel), self._ends[_model(panel)]
        shown = self.courses.shown(panel.rows)
        places_of = _place_axis(axes, self.by, ends)
        for row, course in shown.merged:
            _line(axes, course, places_of(course), looks[name(row)])
        for row, course in shown.failed:
            look, places = looks[name(row)], places_of(course)
            axes.plot(places, course.middle, color=look.color, linewidth=0.8, alpha=0.7)
            axes.plot(places[-1], course.middle[-1], "x", color=look.color, markersize=8, markeredgewidth=1.8)
        for text, look in looks.items():
            axes.plot([], [], color=look.color, label=plotting.label(text), **_shape(look))
        if shown.more:
            axes.plot([], [], "x", color="#555555", label=f"{shown.more} more that did not end ok are not drawn")
        _metric_axis(axes, self.metric, ends.values)


class _Ends(NamedTuple):
    """Ends of axes for some courses: the longest time, the first and last epoch, the least and largest finite value of
    the metric."""

    seconds: float
    epochs: tuple[float, float]
    values: tuple[float, float] | None


def _ends(courses: Sequence[Course]) -> _Ends:
    values = np.concatenate([end for course in courses for end in (course.low, course.high)])
    finite = values[np.isfinite(values)]
    epochs = np.concatenate([course.epoch for course in courses])
    return _Ends(
        max(float(course.elapsed_s.max()) for course in courses),
        (float(epochs.min()), float(epochs.max())),
        (float(finite.min()), float(finite.max())) if len(finite) else None,
    )


def _model(panel: Panel) -> tuple[Any, Any]:
    return panel.model, panel.rows[0]["model_changed"]


def _place_axis(axes: Axes, by: str, ends: _Ends) -> Callable[[Course], Floats]:
    """Draw the axis of epochs, counted from 1, or of time. Returns a function that gives the places of a course."""
    if by == "epoch":
        axes.set_xlabel("epochs of training")
        _limit(axes.set_xlim, ends.epochs[0] + 1, ends.epochs[1] + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return lambda course: course.epoch + 1
    unit, seconds = next(((unit, size) for unit, size in UNITS if ends.seconds >= 3 * size), ("s", 1.0))
    axes.set_xlabel(f"time since the first step, validation included ({unit})")
    _limit(axes.set_xlim, 0.0, ends.seconds / seconds)
    return lambda course: course.elapsed_s / seconds


def _shape(look: Look) -> dict[str, Any]:
    return look.shape | {"markersize": 5, "markeredgewidth": 0.5, "linewidth": 1.2}


def _line(axes: Axes, course: Course, places: Floats, look: Look) -> None:
    axes.plot(places, course.middle, color=look.color, markevery=len(places) // MARKERS + 1, **_shape(look))
    if (course.high > course.low).any():
        axes.fill_between(places, course.low, course.high, color=look.color, alpha=0.15, linewidth=0)
    if np.isfinite(course.inner_low).any():
        axes.fill_between(places, course.inner_low, course.inner_high, color=look.color, alpha=0.25, linewidth=0)


def _metric_axis(axes: Axes, metric: Metric, values: tuple[float, float] | None) -> None:
    label = metric.label
    if values is not None:
        low, high = values
        if not metric.share and high > SQUASHED * low > 0:
            axes.set_yscale("log")
            label = f"{label} (log scale)"
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_ylim(low / 1.1, high * 1.1)
        else:
            _limit(axes.set_ylim, low, high)
    plotting.value_name(axes, label)
    axes.yaxis.set_major_formatter(FuncFormatter(plotting.percent if metric.share else plotting.plain))


def _limit(set_limits: Callable[[float, float], Any], low: float, high: float) -> None:
    """The axis holds both ends, with a margin."""
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    set_limits(low - margin, high + margin)
