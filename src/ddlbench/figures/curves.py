"""Quantities over GPU counts: the values of a row of scaling.csv with its repeats, its interval and its ideal; and one
panel of their curves, with ideal lines and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, nan
from typing import Any, NamedTuple, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Transform, offset_copy

from ddlbench.figures import plotting
from ddlbench.figures.panels import Panel
from ddlbench.figures.plotting import Looks
from ddlbench.results.rows import group_by
from ddlbench.results.tables.measurement import Base, Measurement
from ddlbench.results.tables.quality import TargetCosts
from ddlbench.texts import GIB, limited, shortened

POINTS = 72  # in an inch
WIDEST_STEP = 7.0  # points between two curves at one GPU count: the width of a marker
THEORY_SIZE = 11.0  # points: a marker of what a formula expects
LOG_FROM = 4  # GPU counts: so many and more of them are on a log2 axis
LINEAR_UP_TO = 8  # largest GPU count over the smallest: above this factor fewer counts are on a log2 axis, too
DOTS = 12  # repeats of one measurement: so many are drawn one by one; more of them are a thin line over their range
# The band with crosses of runs that did not end ok:
MOST_STATUSES = 4  # on lines of their own; the others share the last line
CROSSES_SHOWN = 7  # of one status at one GPU count
LINE = 0.075  # of the panel's height
STATUS_LETTERS = 12


class Values(NamedTuple):
    """The drawn values of one row: the merged value, every repeat, and the ends of the interval if there is one."""

    merged: float
    repeats: list[float]
    interval: Sequence[float] = ()


ValuesOf = Callable[[Panel, Measurement], Values | None]  # None where nothing was measured


@dataclass(frozen=True)
class Quantity:
    """Something drawn over GPU counts.

    label:        of its axis; a function where it depends on the panel
    values:       of a row of a panel
    ideal:        its value at a GPU count if scaling from the base were perfect; None where there is none
    theory:       what a formula expects of a row; None where there is none. theory_name: in the legend
    theory_band:  the range in which the formula expects 95 % of the measured values; None without one
    proportional: whether it grows with the GPU count if scaling is ideal
    integers:     whether it is counted, so that its axis has integers only
    """

    label: str | Callable[[Panel], str]
    values: ValuesOf
    ideal: Callable[[Base, float], float] | None = None
    percent: bool = False
    proportional: bool = False
    integers: bool = False
    theory: Callable[[Measurement], float | None] | None = None
    theory_name: str = "theory"
    theory_band: Callable[[Measurement], tuple[float, float] | None] = lambda _: None

    def name(self, panel: Panel) -> str:
        return self.label if isinstance(self.label, str) else self.label(panel)


def memory_column(device: str | None) -> str:
    """The allocator's peak on a GPU, the process's own on a CPU."""
    return "memory_allocated_peak_bytes" if device == "cuda" else "memory_host_peak_bytes"


def _memory_name(panel: Panel) -> str:
    """ "peak allocated memory (GiB)"; with --across device a panel may have GPUs and CPUs."""
    kinds = sorted({"allocated" if row["device"] == "cuda" else "host" for row in panel.rows})
    return f"peak {' or '.join(kinds)} memory (GiB)"


def _of_seconds(value: Callable[[Measurement, float, Base], float], ratio: str = "") -> ValuesOf:
    """Values computed from a row's seconds a sample and its repeats'.

    ratio: the column of scaling.csv with the same value, whose interval also counts that of the base; "": the interval
           is that of the seconds, and the value needs no base
    """

    def values(panel: Panel, row: Measurement) -> Values | None:
        seconds, low, high = (row[f"sample_time_{end}s"] for end in ("", "low_", "high_"))
        base = row.base(panel.on_own_bases)
        if not seconds or (ratio and base is None):
            return None
        base = cast(Base, base)
        rates = (run["throughput_samples_per_s"] for run in row.runs)
        if ratio:
            name = f"{ratio}_vs_own_base" if panel.on_own_bases else ratio
            ends = (row[f"{name}_low"], row[f"{name}_high"]) if row[f"{name}_low"] else ()
        else:
            ends = (value(row, high, base), value(row, low, base)) if low else ()  # shorter times are larger values
        return Values(value(row, seconds, base), [value(row, 1 / rate, base) for rate in rates if rate], ends)

    return values


def of_column(column: str, unit: float = 1.0, interval: Sequence[str] = ()) -> ValuesOf:
    """Values of a column of both runs.csv and scaling.csv. interval: the columns of its ends."""

    def values(panel: Panel, row: Measurement) -> Values | None:
        if row[column] is None:
            return None
        repeats = [run[column] / unit for run in row.runs if run[column] is not None]
        ends = [row[name] for name in interval]
        return Values(row[column] / unit, repeats, () if None in ends else [end / unit for end in ends])

    return values


THROUGHPUT = Quantity(
    "throughput (samples/s)",
    _of_seconds(lambda row, seconds, base: 1 / seconds),
    lambda base, gpus: gpus / (base.gpus * base.seconds),
    proportional=True,
)
SPEEDUP = Quantity(
    lambda panel: "speedup over own base" if panel.on_own_bases else "speedup",
    _of_seconds(lambda row, seconds, base: base.seconds / seconds, "speedup"),
    lambda base, gpus: gpus / base.gpus,
    proportional=True,
)
EFFICIENCY = Quantity(
    lambda panel: "efficiency over own base (%)" if panel.on_own_bases else "efficiency (% of ideal speedup)",
    _of_seconds(lambda row, seconds, base: base.seconds * base.gpus / (seconds * row["gpus"]), "efficiency"),
    lambda base, gpus: 1.0,
    percent=True,
)
EPOCH_TIME = Quantity(
    "time of an epoch (s)", of_column("epoch_time_s", interval=("epoch_time_low_s", "epoch_time_high_s"))
)
ENERGY = Quantity("energy of a sample, all devices (J)", of_column("energy_sample_j"))
BUBBLE = Quantity(
    "bubble (% of the ranks' time)", of_column("bubble"), percent=True, theory=lambda row: row["bubble_theoretical"]
)
STALENESS = Quantity(
    "staleness (updates)",
    of_column("staleness_max"),
    theory=lambda row: row["staleness_theoretical_max"],
    integers=True,
)
# The peak of the fullest rank, the largest of the repeats.
MEMORY = Quantity(_memory_name, lambda panel, row: of_column(memory_column(row["device"]), GIB)(panel, row))
# Beside what --predict says. Waiting for data is on neither side.
PREDICTED = Quantity(
    "time of a step (s)",
    _of_seconds(lambda row, seconds, base: row.busy_step_s(seconds)),
    theory=lambda row: row["predicted_step_s"],
    theory_name="predicted, with its band of 95 %",
    theory_band=lambda row: (row["predicted_low_s"], row["predicted_high_s"]) if row["predicted_low_s"] else None,
)


def to_target(costs: TargetCosts, cost: str) -> Quantity:
    """Epochs or seconds until a metric reached its target."""
    merged = {row["measurement"]: row[f"{cost}_to_target"] for row in costs.rows}

    def values(panel: Panel, row: Measurement) -> Values | None:
        value, paths = merged.get(row["measurement"]), [run["path"] for run in row.runs]
        return None if value is None else Values(value, costs.by_path[cost].reindex(paths).dropna().tolist())

    name = "time since the first step (s)" if cost == "seconds" else cost
    return Quantity(f"{name} to {costs.target.text}", values)


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
            if len(set(ends)) > 1:  # at one GPU count there is no line, and no name in the legend
                axes.plot(ends, ideal, label="ideal", **cast(Any, plotting.IDEAL))
            values += ideal
    for (name, rows), place in zip(curves.items(), places(list(curves.values())), strict=True):
        look = looks[rows[0].curve_key]
        style: dict[str, Any] = {"color": look.color, "transform": beside(axes, place, len(curves), counts)}
        points = {row: point for row in rows if (point := quantity.values(panel, row))}
        _spread(axes, [(row["gpus"], point) for row, point in points.items()], style)
        style |= look.shape | {"zorder": 3, "label": plotting.label(name)}
        plot_by_line(axes, {row: point.merged for row, point in points.items()}, style)
        for point in points.values():
            values += [point.merged, *point.repeats, *point.interval]
    values += _theory_lines(axes, panel, looks, quantity)
    log_values = log and quantity.proportional and all(value > 0 for value in values)
    band = _mark_failures(axes, panel, looks)
    plotting.value_axis(axes, values, quantity.name(panel), quantity.percent, log_values, band, quantity.integers)


def plot_by_line(axes: Axes, values: Mapping[Measurement, float], style: dict[str, Any]) -> None:
    """Draw values over GPU counts. A line joins the fastest row of each count. The others, which have other layouts,
    are markers alone."""
    slowest_first = sorted(values, key=lambda row: -(row["sample_time_s"] or inf))
    joined = sorted({row["gpus"]: row for row in slowest_first}.values(), key=lambda row: row["gpus"])
    axes.plot([row["gpus"] for row in joined], [values[row] for row in joined], **style)
    if alone := [row for row in values if row not in joined]:
        markers: dict[str, Any] = style | {"linestyle": "", "label": ""}
        axes.plot([row["gpus"] for row in alone], [values[row] for row in alone], **markers)


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
        points = {row: value for row in rows if (value := theory(row)) is not None}
        values += points.values()
        plot_by_line(axes, points, style | {"color": look.color, "marker": look.marker, "zorder": 1})
        for row in rows:
            if ends := quantity.theory_band(row):
                axes.plot((row["gpus"],) * 2, ends, color=look.color, linewidth=1, alpha=0.6, zorder=1)
                values += ends
    axes.plot([], [], color="#666666", marker="o", label=quantity.theory_name, **style)
    return values


def _spread(axes: Axes, points: Sequence[tuple[int, Values]], style: dict[str, Any]) -> None:
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
