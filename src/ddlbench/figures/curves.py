"""One panel of curves: a quantity over GPU counts with its repeats, intervals, ideal lines and failures; memory against
throughput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import nan
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Transform, offset_copy

from ddlbench.figures import plotting
from ddlbench.figures.panels import Panel, Plot, with_rows
from ddlbench.figures.plotting import Looks
from ddlbench.figures.quantities import MEMORY, THROUGHPUT, Quantity, Values, memory_column
from ddlbench.results.rows import group_by
from ddlbench.results.tables.measurement import Measurement
from ddlbench.texts import limited, shortened

POINTS = 72  # in an inch
WIDEST_STEP = 7.0  # points between two curves at one GPU count: the width of a marker
THEORY_SIZE = 11.0  # points: a marker of what a formula expects
LOG_FROM = 4  # GPU counts: so many are on a log2 axis
LINEAR_UP_TO = 8  # fewer ones too, where they are further apart than this
DOTS = 12  # repeats of one measurement that are drawn one by one; of more ones the range is a thin line
# The band with crosses of runs that did not end ok:
MOST_STATUSES = 4  # on lines of their own; the others share the last line
CROSSES_SHOWN = 7  # of one status at one GPU count
LINE = 0.075  # of the panel's height
STATUS_LETTERS = 12

Point = tuple[int, Values]


def draw(axes: Axes, panel: Panel, looks: Looks, quantity: Quantity, others: Sequence[int] = ()) -> None:
    """Draw a quantity of the panel's rows. others: GPU counts that the axis has too"""
    counts = [*panel.gpus, *others]
    # Few counts are on a linear axis: a straight line shows a quantity that grows with them best.
    far = max(counts) / min(counts) > LINEAR_UP_TO
    log = len(set(counts)) >= LOG_FROM or (far and not quantity.proportional)
    plotting.gpu_axis(axes, counts, panel.device, log)
    curves, values = panel.curves, list[float]()
    if quantity.ideal:  # a line from each base to the largest GPU count
        for base in dict.fromkeys(filter(None, (row.base(panel.on_own_bases) for row in panel.rows))):
            ends = (base.gpus, max(panel.gpus))
            ideal = [quantity.ideal(base, count) for count in ends]
            axes.plot(ends, ideal, label="ideal", **cast(Any, plotting.IDEAL))
            values += ideal
    for (name, rows), place in zip(curves.items(), places(list(curves.values())), strict=True):
        look = looks[rows[0].curve_key]
        style = {"color": look.color, "transform": beside(axes, place, len(curves), counts)}
        slowest_first = sorted(rows, key=lambda row: -(row["sample_time_s"] or 0.0))
        of_rows = [(row["gpus"], quantity.values(panel, row)) for row in slowest_first]
        points = [point for point in of_rows if point[1].merged is not None]
        _spread(axes, points, style)
        fastest = sorted(dict(points).items())  # of each GPU count: a line joins them
        for shown, more in ((points, {"linestyle": ""}), (fastest, {"label": plotting.label(name)})):
            merged = [cast(float, point.merged) for _, point in shown]
            axes.plot([gpus for gpus, _ in shown], merged, zorder=3, **cast(Any, style | look.shape | more))
        values += [
            value
            for _, point in points
            for value in (cast(float, point.merged), *point.repeats, *(point.interval or ()))
        ]
    values += _theory_lines(axes, panel, looks, quantity)
    log_values = log and quantity.proportional and all(value > 0 for value in values)
    band = _mark_failures(axes, panel, looks)
    plotting.value_axis(axes, values, quantity.name(panel), quantity.percent, log_values, band, quantity.integers)


def places(drawn: Sequence[Sequence[Measurement]]) -> list[float]:
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


def _theory_lines(axes: Axes, panel: Panel, looks: Looks, quantity: Quantity) -> list[float]:
    """Draw the values that a formula expects, if there is one, as thin dotted lines, with open markers around those of
    equal measured values, and the band of each as a vertical line. Returns the values drawn."""
    theory = quantity.theory
    if theory is None:
        return []
    style: dict[str, Any] = {"fillstyle": "none", "markersize": THEORY_SIZE, "linestyle": ":", "linewidth": 1}
    values: list[float] = []
    for rows in panel.curves.values():
        look = looks[rows[0].curve_key]
        points = sorted((row["gpus"], value) for row in rows if (value := theory(row)) is not None)
        values += [value for _, value in points]
        xs, ys = [gpus for gpus, _ in points], [value for _, value in points]
        axes.plot(xs, ys, color=look.color, marker=look.marker, zorder=1, **style)
        for row in rows:
            if ends := quantity.theory_band(row):
                axes.plot((row["gpus"],) * 2, ends, color=look.color, linewidth=1, alpha=0.6, zorder=1)
                values += ends
    axes.plot([], [], color="#666666", marker="o", label=quantity.theory_name, **style)
    return values


def _spread(axes: Axes, points: Sequence[Point], style: dict[str, Any]) -> None:
    """Repeats as dots, or as a thin line over their range where they are many; intervals as bars."""
    few = [(gpus, value) for gpus, values in points if len(values.repeats) <= DOTS for value in values.repeats]
    if few:
        xs, ys = zip(*few, strict=True)
        axes.plot(xs, ys, ".", alpha=0.35, markersize=5, zorder=2, **style)
    many = [(gpus, (min(v.repeats), max(v.repeats))) for gpus, v in points if len(v.repeats) > DOTS]
    intervals = [(gpus, values.interval) for gpus, values in points if values.interval]
    for bars, width in ((many, 1.0), (intervals, 3.5)):
        if bars:  # one line, with a gap after each bar
            xs = [x for gpus, _ in bars for x in (gpus, gpus, nan)]
            ys = [y for _, (low, high) in bars for y in (low, high, nan)]
            axes.plot(xs, ys, zorder=2, linewidth=width, alpha=0.45, **style)


def _mark_failures(axes: Axes, panel: Panel, looks: Looks) -> float:
    """Draw a band with the rows without an attempt that ended ok, a line for each status. Returns the share of the
    panel's height that it needs."""
    failed = [row for row in panel.rows if row["status"] != "ok"]
    lines = list(group_by(failed, lambda row: shortened(str(row["status"]), STATUS_LETTERS)).items())
    if len(lines) > MOST_STATUSES:
        others = [row for _, rows in lines[MOST_STATUSES - 1 :] for row in rows]
        lines = [*lines[: MOST_STATUSES - 1], ("others", others)]
    if not lines:
        return 0.0
    share = LINE * len(lines) + 0.02
    axes.add_patch(Rectangle((0, 1 - share), 1, share, transform=axes.transAxes, color="#f4f2ef", zorder=2.5))
    for number, (status, rows) in enumerate(lines):
        height = 1 - 0.01 - LINE * (number + 0.5)
        axes.annotate(
            status, (0, height), (-5, 0), xycoords="axes fraction", textcoords="offset points",
            ha="right", va="center", fontsize=7.5, color="#8a3324",
        )  # fmt: skip
        for gpus, mates in group_by(rows, lambda row: row["gpus"]).items():
            (shown, others), place = limited(mates, CROSSES_SHOWN), axes.get_xaxis_transform()
            for n, row in enumerate(shown):  # beside each other
                aside = offset_copy(place, cast(Figure, axes.figure), (n - (len(shown) - 1) / 2) * 6, units="points")
                axes.plot(
                    gpus, height, "x", transform=aside, color=looks[row.curve_key].color, markersize=5,
                    markeredgewidth=1.6, clip_on=False, zorder=4,
                )  # fmt: skip
            if others:
                axes.annotate(
                    f"+{others}", (gpus, height), (3 * len(shown) + 2, 0), xycoords=place,
                    textcoords="offset points", ha="left", va="center", fontsize=7, color="#333333",
                )  # fmt: skip
    return share


def tradeoff(shown: Iterable[Panel], looks: Looks) -> Plot:
    """One marker for each row with a throughput and a peak of memory, those of all frameworks in one panel."""
    rows = with_rows(list(shown), lambda row: row["sample_time_s"] and row[memory_column(row["device"])] is not None)
    return Plot("memory_and_throughput", rows, lambda axes, panel: _draw_tradeoff(axes, panel, looks))


def _draw_tradeoff(axes: Axes, panel: Panel, looks: Looks) -> None:
    """The grey line joins the rows that no other one beats: each other row that is faster needs more memory."""
    points = list[tuple[float, float]]()
    for name, rows in panel.curves.items():
        look = looks[rows[0].curve_key]
        of_curve = [(cast(float, MEMORY.values(panel, row).merged), 1 / row["sample_time_s"]) for row in rows]
        points += of_curve
        shape: dict[str, Any] = {**look.shape, "linestyle": ""}
        xs, ys = zip(*of_curve, strict=True)
        axes.plot(xs, ys, color=look.color, label=plotting.label(name), zorder=3, **shape)
    axes.plot(*zip(*front(points), strict=True), color="#999999", linewidth=1, label="not beaten in both", zorder=2)
    axes.margins(0.08)
    axes.set_xlabel(MEMORY.name(panel))
    plotting.value_name(axes, THROUGHPUT.name(panel))


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (memory, throughput) that no other point beats or equals in both, from the smallest memory."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best
