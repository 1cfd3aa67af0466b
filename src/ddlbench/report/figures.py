"""The figures of a report: throughput, speedup, efficiency and memory over GPU counts, learning over epochs and time.

A marker is the merged value of the repeats, small dots are the repeats themselves, a bar is the interval of the median
where they are enough for one, a cross on the axis is a configuration without an attempt that ended ok.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlbench.report import plotting
from ddlbench.report.labels import marked
from ddlbench.report.learning import learning_figures
from ddlbench.report.merge import Row, group_by
from ddlbench.report.panels import Panel, curve_name, curves, panels
from ddlbench.report.plotting import Look
from ddlbench.report.tables import Tables, records
from ddlbench.report.texts import shortened

GIB = 2**30
FAILURES_SHOWN = 10  # above one another, at one GPU count of a panel
MEMORY = {"cpu": "memory_host_peak_bytes", "cuda": "memory_allocated_peak_bytes"}


@dataclass(frozen=True)
class Values:
    """What is drawn of one row: the merged value, the interval around it if there is one, every repeat."""

    merged: float | None
    repeats: list[float] = field(default_factory=list[float])
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Quantity:
    """Something drawn over GPU counts. `ideal`: its value at a GPU count if scaling from the row's reference were
    perfect; None where there is no ideal."""

    label: str
    values: Callable[[Row], Values]
    ideal: Callable[[Row, float], float] | None = None
    percent: bool = False
    told_base: bool = False
    per_gpu: bool = True  # ideally proportional to the GPU count: needs a linear axis


def make_figures(tables: Tables) -> dict[str, Figure]:
    """Every figure that the tables have something for, by name."""
    runs = records(tables.runs)
    scaling = marked(records(tables.scaling), runs)
    looks = plotting.looks_of(str(row["framework"]) for row in scaling)
    with mpl.rc_context(cast(Any, plotting.STYLE)):
        shared = panels(scaling, runs)
        own = [panel.against_own_bases() for panel in shared if panel.own_bases_tell_more]
        drawn = {
            "throughput": _figure(shared, looks, lambda _: THROUGHPUT),
            "speedup": _figure(shared, looks, lambda _: SPEEDUP),
            "efficiency": _figure(shared, looks, lambda _: EFFICIENCY),
            "speedup_own_base": _figure(own, looks, lambda _: SPEEDUP),
            "efficiency_own_base": _figure(own, looks, lambda _: EFFICIENCY),
            "memory": _figure(shared, looks, _memory),
            **learning_figures(records(tables.epochs), scaling, looks),
        }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _of_seconds(value: Callable[[Row, float], float]) -> Callable[[Row], Values]:
    """Values computed from a row's seconds a sample, its repeats' and its interval's."""

    def values(row: Row) -> Values:
        seconds, low, high = (row[f"sample_time_{end}s"] for end in ("", "low_", "high_"))
        if not seconds or not row["reference_s"]:
            return Values(None)
        rates = (run["throughput_samples_per_s"] for run in row["repeats"])
        ends = (value(row, high), value(row, low)) if low else None  # shorter times are larger values
        return Values(value(row, seconds), [value(row, 1 / rate) for rate in rates if rate], ends)

    return values


THROUGHPUT = Quantity(
    "throughput (samples/s)",
    _of_seconds(lambda row, seconds: 1 / seconds),
    lambda row, gpus: gpus / (row["reference_gpus"] * row["reference_s"]),
)
SPEEDUP = Quantity(
    "speedup",
    _of_seconds(lambda row, seconds: row["reference_s"] / seconds),
    lambda row, gpus: gpus / row["reference_gpus"],
    told_base=True,
)
EFFICIENCY = Quantity(
    "efficiency (% of ideal speedup)",
    _of_seconds(lambda row, seconds: row["reference_s"] * row["reference_gpus"] / (seconds * row["gpus"])),
    lambda row, gpus: 1.0,
    percent=True,
    told_base=True,
    per_gpu=False,
)


def _memory(panel: Panel) -> Quantity:
    """The allocator's peak on a GPU, the process's own on a CPU; the fullest rank, the largest of the repeats."""
    column = MEMORY.get(panel.device or "", MEMORY["cpu"])

    def values(row: Row) -> Values:
        repeats = [run[column] / GIB for run in row["repeats"] if run[column] is not None]
        return Values(row[column] / GIB if row[column] is not None else None, repeats)

    name = "host" if column == MEMORY["cpu"] else "allocated"
    return Quantity(f"peak {name} memory (GiB)", values, per_gpu=False)


def _figure(shown: Sequence[Panel], looks: dict[str, Look], choose: Callable[[Panel], Quantity]) -> Figure | None:
    if not shown:
        return None
    figure, axes = plotting.grid(len(shown))
    for panel, place in zip(shown, axes, strict=False):  # the first, where there are too many
        _draw(place, panel, looks, choose(panel))
    plotting.legend(figure, axes)
    return figure


def _draw(axes: Axes, panel: Panel, looks: dict[str, Look], quantity: Quantity) -> None:
    plotting.title(axes, panel.model, [*panel.lines, panel.base if quantity.told_base else ""])
    plotting.gpu_axis(axes, panel.gpus, panel.device, linear=quantity.per_gpu)
    drawn = curves(panel)
    numbers = plotting.earlier(str(rows[0]["framework"]) for rows in drawn)
    values = _ideal_lines(axes, panel, quantity.ideal) if quantity.ideal else []
    for place, (rows, number) in enumerate(zip(drawn, numbers, strict=True)):
        look = looks[str(rows[0]["framework"])]
        style = {"color": look.color, "transform": plotting.beside(axes, place, len(drawn))}
        shape = {"marker": look.marker(number), "linestyle": plotting.DASHES[number % len(plotting.DASHES)]}
        values += _curve(axes, rows, quantity, style, shape)
    plotting.value_axis(axes, values, quantity.label, quantity.percent)
    _failures(axes, panel, looks)


def _ideal_lines(axes: Axes, panel: Panel, ideal: Callable[[Row, float], float]) -> list[float]:
    """From each base to the largest GPU count. Returns the values drawn."""
    bases = {(row["reference_gpus"], row["reference_s"]): row for row in panel.rows if row["reference_s"]}
    ends = [((start, max(panel.gpus)), row) for (start, _), row in bases.items()]
    lines = [(counts, [ideal(row, count) for count in counts]) for counts, row in ends]
    for counts, values in lines:
        axes.plot(counts, values, label="ideal", **cast(Any, plotting.IDEAL))
    return [value for _, values in lines for value in values]


def _curve(
    axes: Axes, rows: list[Row], quantity: Quantity, style: dict[str, Any], shape: dict[str, Any]
) -> list[float]:
    """All rows of a curve as markers; the line joins the fastest of each GPU count. Returns the values drawn."""
    slowest_first = sorted(rows, key=lambda row: -(row["sample_time_s"] or 0.0))
    known = [(row["gpus"], values) for row in slowest_first if (values := quantity.values(row)).merged is not None]
    for gpus, values in known:
        axes.plot([gpus] * len(values.repeats), values.repeats, ".", alpha=0.35, markersize=5, zorder=2, **style)
        if values.interval:
            axes.plot([gpus, gpus], values.interval, linewidth=3.5, alpha=0.45, zorder=2, **style)
    _line(axes, known, style | shape | {"linestyle": ""})
    _line(axes, sorted(dict(known).items()), style | shape | {"label": plotting.label(curve_name(rows[0]))})
    return [value for _, values in known for value in (cast(float, values.merged), *values.repeats)]


def _line(axes: Axes, points: Sequence[tuple[int, Values]], style: dict[str, Any]) -> None:
    merged = [cast(float, values.merged) for _, values in points]
    axes.plot([gpus for gpus, _ in points], merged, markeredgecolor="white", zorder=3, **style)


def _failures(axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    """A cross with the status, on the axis, one above the other where several failed at one GPU count."""
    failed = [row for row in panel.rows if row["status"] != "ok"]
    for gpus, rows in group_by(failed, lambda row: row["gpus"]).items():
        for number, row in enumerate(rows[:FAILURES_SHOWN]):
            color = looks[str(row["framework"])].color
            where = axes.get_xaxis_transform()
            axes.plot(
                gpus, _height(number), "x", transform=where, color=color, markeredgewidth=2, clip_on=False, zorder=4
            )
            _beside_cross(axes, gpus, number, shortened(str(row["status"]), 20), color)
        if len(rows) > FAILURES_SHOWN:
            _beside_cross(axes, gpus, FAILURES_SHOWN, f"and {len(rows) - FAILURES_SHOWN} more", "#333333")


def _height(number: int) -> float:
    """Of a cross above the axis, as a share of the panel's height."""
    return 0.035 + 0.075 * number


def _beside_cross(axes: Axes, gpus: int, number: int, text: str, color: str) -> None:
    axes.annotate(
        text, (gpus, _height(number)), (-6, 0), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
        annotation_clip=False, ha="right", va="center", fontsize=8, color=color,
    )  # fmt: skip
