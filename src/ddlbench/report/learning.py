"""Learning curves over epochs and over time: top-1 for images, perplexity for text, never on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ddlbench.report.merge import Row, group_by
from ddlbench.report.panels import curve_name, devices, settings
from ddlbench.report.plotting import DASHES, Look, earlier, grid, label, legend, paler, percent, plain, title

METRICS = {
    "accuracy": ("val_top1", "top-1 (% of validation samples)"),
    "perplexity": ("val_perplexity_token", "validation perplexity per token"),
}
UNITS = (("h", 3600.0), ("min", 60.0))
SQUASHED = 20  # a curve that falls by more than this factor has no visible end on a linear axis


def learning_figures(epochs: Sequence[Row], scaling: Sequence[Row], looks: dict[str, Look]) -> dict[str, Figure | None]:
    """Each metric by epoch and by time; None where no run has it. One thin line per run; repeats look the same."""
    points = {row["measurement"]: row for row in scaling}
    told = settings(scaling)
    figures: dict[str, Figure | None] = {}
    for name, (column, axis) in METRICS.items():
        rows = [row for row in epochs if row[column] is not None and row["measurement"] in points]
        merged = [_merged(row, points[row["measurement"]], told[row["measurement"]]) for row in rows]
        figures[f"{name}_by_epoch"] = _figure(merged, column, axis, looks, over_time=False)
        figures[f"{name}_by_time"] = _figure(merged, column, axis, looks, over_time=True)
    return figures


def _merged(row: Row, point: Row, told: str) -> Row:
    """A row of epochs.csv beside its measurement, whose model is marked where its sizes are not as published."""
    return row | {"point": point, "told": told, "model": point["model"]}


def _figure(rows: list[Row], column: str, axis: str, looks: dict[str, Look], over_time: bool) -> Figure | None:
    known = [row for row in rows if row["elapsed_s"] is not None] if over_time else rows
    if not known:
        return None
    panels = group_by(known, lambda row: (row["model"], row["point"]["comparison"]))
    figure, axes = grid(len(panels))
    for place, panel in zip(axes, panels.values(), strict=False):  # the first, where there are too many
        title(place, str(panel[0]["model"]), [panel[0]["told"]])
        x = _time_axis(place, panel) if over_time else _epoch_axis(place)
        _curves(place, panel, x, column, Legend.of(panel, looks))
        place.set_ylabel(axis)
        _metric_axis(place, column, [row[column] for row in panel])
    legend(figure, axes)
    return figure


def _epoch_axis(axes: Axes) -> tuple[str, float]:
    axes.set_xlabel("epochs of training")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return "epoch", 1.0


def _time_axis(axes: Axes, rows: list[Row]) -> tuple[str, float]:
    longest = max(row["elapsed_s"] for row in rows)
    unit, seconds = next(((unit, size) for unit, size in UNITS if longest >= 3 * size), ("s", 1.0))
    axes.set_xlabel(f"time since the first step, validation included ({unit})")
    return "elapsed_s", seconds


@dataclass(frozen=True)
class Legend:
    """How the curves of a panel differ: colour and marker are the framework and its knobs, dashes and strength of
    the colour are GPU count and batch."""

    names: list[tuple[str, str]]  # framework, name of the curve
    sizes: list[tuple[int, int]]  # GPUs, global batch
    looks: dict[str, Look]

    @classmethod
    def of(cls, rows: Sequence[Row], looks: dict[str, Look]) -> Legend:
        return cls(sorted({_name(row) for row in rows}), sorted({_size(row) for row in rows}), looks)

    def style(self, row: Row) -> dict[str, Any]:
        number = self.sizes.index(_size(row))
        return self._named(_name(row)) | self._sized(number, self.looks[_name(row)[0]].color)

    def draw(self, axes: Axes, device: str | None) -> None:
        """Empty lines that carry the labels."""
        for name in self.names:
            axes.plot([], [], color=self.looks[name[0]].color, label=label(name[1]), **self._named(name))
        several = len({gpus for gpus, _ in self.sizes}) < len(self.sizes)
        for number, (gpus, batch) in enumerate(self.sizes):
            size = devices(gpus, device) + (f", batch {batch}" if several else "")
            axes.plot([], [], label=size, **self._sized(number, "#333333"))

    def _named(self, name: tuple[str, str]) -> dict[str, Any]:
        number = earlier(framework for framework, _ in self.names)[self.names.index(name)]
        return {"marker": self.looks[name[0]].marker(number), "markersize": 4.5, "markeredgecolor": "white"}

    def _sized(self, number: int, color: str) -> dict[str, Any]:
        strength = 0.45 + 0.55 * (number + 1) / len(self.sizes)
        return {"color": paler(color, strength), "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.2}


def _name(row: Row) -> tuple[str, str]:
    return str(row["framework"]), curve_name(row["point"])


def _size(row: Row) -> tuple[int, int]:
    return row["gpus"] or 0, row["global_batch"] or 0


def _curves(axes: Axes, rows: list[Row], x: tuple[str, float], column: str, legend: Legend) -> None:
    for run in group_by(rows, lambda row: row["path"]).values():
        places = [(row[x[0]] + (x[0] == "epoch")) / x[1] for row in run]
        values, style = [row[column] for row in run], legend.style(run[0])
        axes.plot(places, values, markeredgewidth=0.6, markevery=len(run) // 12 + 1, **style)
        if run[-1]["status"] != "ok":
            axes.plot(places[-1], values[-1], "x", color=style["color"], markersize=9, markeredgewidth=2)
    legend.draw(axes, rows[0]["point"]["device"])


def _metric_axis(axes: Axes, column: str, values: list[float]) -> None:
    if column == "val_top1":
        axes.yaxis.set_major_formatter(FuncFormatter(percent))
        return
    if max(values) > SQUASHED * min(values) > 0:
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
