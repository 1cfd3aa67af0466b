"""One panel over GPU counts: curves with their repeats and intervals, ideal lines, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import nan
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Transform, offset_copy

from ddlbench.figures import plotting
from ddlbench.figures.failures import band, mark_failures
from ddlbench.figures.panels import Base, Panel, curve_key, curve_name, curves
from ddlbench.figures.quantities import Quantity, Values
from ddlbench.figures.styles import Look, Looks
from ddlbench.results.rows import Row

POINTS = 72  # in an inch
WIDEST_STEP = 7.0  # points between two curves at one GPU count: the width of a marker
THEORY_SIZE = 11.0  # points: a marker of what a formula expects
DOTS = 12  # repeats of one measurement that are drawn one by one; of more ones the range is a thin line

Point = tuple[int, Values]


def draw(axes: Axes, panel: Panel, looks: Looks, quantity: Quantity, others: Sequence[int] = ()) -> None:
    """Draw a quantity of the panel's rows. others: GPU counts that the axis has too"""
    counts = [*panel.gpus, *others]
    log = plotting.log_counts(counts, quantity.proportional)
    plotting.gpu_axis(axes, counts, panel.device, log)
    drawn = curves(panel)
    names = [curve_name(rows[0]) for rows in drawn]
    curve_looks = looks.of([curve_key(rows[0]) for rows in drawn])
    values = _ideal_lines(axes, panel, quantity.ideal) if quantity.ideal else []
    for rows, look, name, place in zip(drawn, curve_looks, names, places(drawn), strict=True):
        style = {"color": look.color, "transform": beside(axes, place, len(drawn), counts)}
        points = _points(panel, rows, quantity)
        _spread(axes, points, style)
        _markers(axes, points, look, style, name)
        values += [
            value
            for _, point in points
            for value in (cast(float, point.merged), *point.repeats, *(point.interval or ()))
        ]
    if quantity.theory:
        values += _theory_lines(axes, list(zip(drawn, curve_looks, strict=True)), quantity.theory, quantity.theory_name)
    log_values = log and quantity.proportional and all(value > 0 for value in values)
    plotting.value_axis(axes, values, quantity.label, quantity.percent, log_values, band(panel), quantity.integers)
    mark_failures(axes, panel, dict(zip(names, curve_looks, strict=True)))


def places(drawn: Sequence[Sequence[Row]]) -> list[float]:
    """The place of each curve beside the others: -1, 0, 1 for three of them; 0 where it has no GPU count in common."""
    counts = [{row["gpus"] for row in rows} for rows in drawn]
    shared = [gpus for gpus in counts if sum(bool(gpus & other) for other in counts) > 1]
    order = iter(range(len(shared)))
    return [next(order) - (len(shared) - 1) / 2 if gpus in shared else 0.0 for gpus in counts]


def beside(axes: Axes, place: float, of: int, counts: Iterable[int]) -> Transform:
    """Data coordinates moved sideways by a few points, so that equal values of several curves stay visible.

    counts: GPU counts of the axis; the curves share less than half of the room between two of them
    """
    at = sorted(float((axes.transScale + axes.transLimits).transform((count, 1))[0]) for count in set(counts))
    room = min((later - one for one, later in pairwise(at)), default=0.5) * plotting.PANEL[0] * POINTS
    step = min(WIDEST_STEP, 0.45 * room / of)
    return offset_copy(axes.transData, cast(Figure, axes.figure), place * step, units="points")


def _points(panel: Panel, rows: list[Row], quantity: Quantity) -> list[Point]:
    """The points that have a value, the slowest rows first."""
    slowest_first = sorted(rows, key=lambda row: -(row["sample_time_s"] or 0.0))
    return [
        (row["gpus"], values) for row in slowest_first if (values := quantity.values(panel, row)).merged is not None
    ]


def _ideal_lines(axes: Axes, panel: Panel, ideal: Callable[[Base, float], float]) -> list[float]:
    """From each base to the largest GPU count. Returns the values drawn."""
    drawn: list[float] = []
    for base in dict.fromkeys(filter(None, map(panel.base_of, panel.rows))):
        counts = (base.gpus, max(panel.gpus))
        values = [ideal(base, count) for count in counts]
        axes.plot(counts, values, label="ideal", **cast(Any, plotting.IDEAL))
        drawn += values
    return drawn


def _theory_lines(
    axes: Axes, drawn: list[tuple[list[Row], Look]], theory: Callable[[Row], float | None], name: str
) -> list[float]:
    """What a formula expects, as thin dotted lines with open markers around those of equal measured values. Returns the
    values drawn."""
    style: dict[str, Any] = {"fillstyle": "none", "markersize": THEORY_SIZE, "linestyle": ":", "linewidth": 1}
    values: list[float] = []
    for rows, look in drawn:
        points = sorted((row["gpus"], value) for row in rows if (value := theory(row)) is not None)
        values += [value for _, value in points]
        xs, ys = [gpus for gpus, _ in points], [value for _, value in points]
        axes.plot(xs, ys, color=look.color, marker=look.marker, zorder=1, **style)
    axes.plot([], [], color="#666666", marker="o", label=name, **style)
    return values


def _spread(axes: Axes, points: Sequence[Point], style: dict[str, Any]) -> None:
    """Repeats as dots, or as a thin line over their range where they are many; intervals as bars."""
    few = [(gpus, value) for gpus, values in points if len(values.repeats) <= DOTS for value in values.repeats]
    if few:
        xs, ys = zip(*few, strict=True)
        axes.plot(xs, ys, ".", alpha=0.35, markersize=5, zorder=2, **style)
    many = [(gpus, (min(v.repeats), max(v.repeats))) for gpus, v in points if len(v.repeats) > DOTS]
    intervals = [(gpus, values.interval) for gpus, values in points if values.interval]
    _bars(axes, many, style, linewidth=1.0, alpha=0.45)
    _bars(axes, intervals, style, linewidth=3.5, alpha=0.45)


def _bars(axes: Axes, ends: Sequence[tuple[int, tuple[float, float]]], style: dict[str, Any], **line: float) -> None:
    """One line, with a gap after each bar."""
    if ends:
        xs = [x for gpus, _ in ends for x in (gpus, gpus, nan)]
        ys = [y for _, (low, high) in ends for y in (low, high, nan)]
        axes.plot(xs, ys, zorder=2, **style, **cast(Any, line))


def _markers(axes: Axes, points: Sequence[Point], look: Look, style: dict[str, Any], name: str) -> None:
    """All rows as markers; the line joins the fastest of each GPU count."""
    fastest = sorted(dict(points).items())
    for shown, more in ((points, {"linestyle": ""}), (fastest, {"label": plotting.label(name)})):
        merged = [cast(float, values.merged) for _, values in shown]
        axes.plot([gpus for gpus, _ in shown], merged, zorder=3, **cast(Any, style | look.shape | more))
