"""Bars: a quantity of each curve; where the time of a step goes, by GPU count, as shares or seconds, measured and
predicted; the waterfall of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ddlbench.figures import plotting
from ddlbench.figures.curves import Quantity
from ddlbench.figures.panels import Panel, short_names
from ddlbench.figures.plotting import Looks
from ddlbench.results.rows import group_by
from ddlbench.results.tables.scaling import PARTS

PartLook = tuple[str, str, str]
LOOKS: dict[str, PartLook] = {  # of each part: its name in words, a color and a hatching
    "forward": ("forward", "#56B4E9", ""),
    "backward": ("backward", "#0072B2", ""),
    "update": ("update", "#009E73", ""),
    "other_compute": ("other computing", "#B8D8BE", ""),
    "comm_exposed": ("exposed communication", "#D55E00", "//"),
    "data": ("waiting for data", "#E69F00", ".."),
    "idle": ("idle", "#d9d9d9", ""),
}
SHARES = tuple(f"{part}_share" for part in PARTS)  # columns of rows with a profiled window
COMPUTING = ("computing", "#0072B2", "")
BUBBLE = ("bubble", "#CC79A7", "")
UNDIVIDED = ("idle, or not divided (no profiled window)", "#d9d9d9", "")
# The bars of a waterfall that are no computing.
WATERFALL: dict[str, PartLook] = {
    "ideal": LOOKS["update"],
    "input": LOOKS["data"],
    "exposed communication": LOOKS["comm_exposed"],
    "bubble": BUBBLE,
    "host and launch": LOOKS["idle"],
    "unexplained": UNDIVIDED,
}
EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
MOST_BARS = 24  # beside each other in one panel
LONGEST_NAME = 32  # letters; bars with a longer name are numbered
STEPS_SHOWN = 2  # of a schedule over time
LETTERS = 36  # of all names below a panel; if there are more, the names are turned


def in_parts(shown: Sequence[Panel]) -> list[Panel]:
    """The panels with their rows in the order of curves; several for one that has too many bars."""
    parts: list[Panel] = []
    for panel in shown:
        rows = sorted(panel.rows, key=lambda row: (row.curve, row["gpus"]))
        count = -(-len(rows) // MOST_BARS)
        for n in range(count):
            lines = [*panel.lines, *([f"part {n + 1} of {count}"] if count > 1 else [])]
            parts.append(replace(panel, lines=lines, rows=rows[n * MOST_BARS : (n + 1) * MOST_BARS]))
    return parts


def draw_breakdown(axes: Axes, panel: Panel, seconds: bool = False) -> None:
    """One bar for each framework and GPU count: shares of a step, or its seconds."""
    lengths = [row["profile_step_time_s"] if seconds else 1.0 for row in panel.rows]
    tops = _stack(axes, range(len(lengths)), 0.8, {
        LOOKS[part]: [row[f"{part}_share"] * length for row, length in zip(panel.rows, lengths, strict=True)]
        for part in PARTS
    })  # fmt: skip
    _name_bars(axes, panel)
    if seconds:
        plotting.value_axis(axes, tops, "time of a step (s)", percents=False, log=False)
        return
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(plotting.percent))
    plotting.value_name(axes, "share of a step's time (%)")


def draw_predicted(axes: Axes, panel: Panel) -> None:
    """Two bars for each framework and GPU count, without waiting for data: measured at the left, predicted at the
    right, with the accuracy of the prediction in percent, 100 (1 - |error|), above them (Kahira et al. 2021, figure 1).
    A measured step without a profiled window is one part."""
    seconds: dict[PartLook, list[float]] = {COMPUTING: [], LOOKS["comm_exposed"]: [], UNDIVIDED: []}
    for row in panel.rows:
        shares = (row["compute_share"], row["comm_exposed_share"], row["idle_share"])
        shares = (0.0, 0.0, 1.0) if None in shares or not sum(shares) else shares
        step_s = row.busy_step_s(row["sample_time_s"])
        for of_rows, share in zip(seconds.values(), shares, strict=True):
            of_rows.append(step_s * share / sum(shares))
    parts = {COMPUTING: "compute", LOOKS["comm_exposed"]: "comm_exposed", BUBBLE: "bubble"}
    predicted = {look: [row[f"predicted_{part}_s"] or 0.0 for row in panel.rows] for look, part in parts.items()}
    places = range(len(panel.rows))
    left, right = ([place + aside for place in places] for aside in (-0.21, 0.21))
    tops = list(map(max, _stack(axes, left, 0.38, seconds), _stack(axes, right, 0.38, predicted)))
    for place, top, row in zip(places, tops, panel.rows, strict=True):
        text = f"{100 * (1 - abs(row['predicted_error'])):.0f} %"
        axes.annotate(text, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    _name_bars(axes, panel)
    plotting.value_axis(axes, tops, "time of a step (s), measured | predicted", percents=False, log=False, band=0.08)


def draw_schedule(axes: Axes, panel: Panel) -> None:
    """The passes of a pipeline over time in its profiled window: one row for each rank, with all its stages, rank 0 at
    the top; one box for each pass of a micro batch (Lin et al. 2022, figures 2 and 3)."""
    (row,) = panel.rows
    ranks = row.passes
    begin = min(passes[0][1] for passes in ranks.values())
    longest_s = max(end for passes in ranks.values() for *_, end in passes) - begin
    step_s = row["profile_step_time_s"]
    shown_s = min(longest_s, STEPS_SHOWN * step_s) if step_s else longest_s
    for number, passes in ranks.items():
        for part, parts in group_by(passes, lambda one: one[0]).items():
            name, color, hatch = LOOKS.get(part, LOOKS["other_compute"])
            boxes = [(start - begin, end - start) for _, start, end in parts if start - begin <= shown_s]
            axes.broken_barh(boxes, (number - 0.4, 0.8), facecolor=color, hatch=hatch, label=name, **EDGE)
    axes.set_yticks(list(ranks), [str(number) for number in ranks])
    axes.set_ylim(max(ranks) + 0.6, min(ranks) - 0.6)
    axes.set_xlim(0, shown_s)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds of the profiled window")
    plotting.value_name(axes, "rank of the pipeline")


def draw_bars(axes: Axes, panel: Panel, looks: Looks, quantity: Quantity) -> None:
    """One bar for each curve and GPU count, with its repeats as dots and the interval of its median."""
    values = list[float]()
    for place, row in enumerate(panel.rows):
        bar = quantity.values(panel, row)
        if bar is None:  # a failure has its place
            axes.annotate(
                f"{row['status']}", (place, 0), (0, 3), textcoords="offset points", ha="center", va="bottom",
                rotation=90, fontsize=7.5, color="#8a3324",
            )  # fmt: skip
            continue
        color = looks[row.curve_key].color
        values += [bar.merged, *bar.repeats, *bar.interval]
        axes.bar(place, bar.merged, 0.7, color=color, alpha=0.8, label=plotting.label(str(row["compared"])))
        axes.plot([place] * len(bar.repeats), bar.repeats, ".", color="black", markersize=3, zorder=3)
        if bar.interval:
            axes.vlines(place, min(bar.interval), max(bar.interval), color="black", linewidth=1.5, zorder=3)
    _name_bars(axes, panel)
    plotting.value_axis(axes, values, quantity.name(panel), quantity.percent, log=False)


def _stack(axes: Axes, places: Sequence[float], width: float, parts: Mapping[PartLook, Sequence[float]]) -> list[float]:
    """Bars of parts on top of each other; returns the height of each."""
    below = [0.0] * len(places)
    for (name, color, hatch), values in parts.items():
        if any(values):
            axes.bar(places, values, width, below, color=color, hatch=hatch, label=name, **EDGE)
        below = [low + value for low, value in zip(below, values, strict=True)]
    return below


def _name_bars(axes: Axes, panel: Panel) -> None:
    """Name each row's place by what differs and its GPU count; number them where a name is too long, with the names
    below."""
    rows, device = panel.rows, plotting.counted(panel.device)
    names = short_names(rows)
    if len(set(names)) == 1:
        names, below = [str(gpus) for gpus in panel.gpus], f"{device}, {plotting.label(rows[0].curve)}"
    elif len(set(panel.gpus)) == 1:
        below = f"on {rows[0].devices}"
    else:
        names = [f"{name} {gpus}" for name, gpus in zip(names, panel.gpus, strict=True)]
        below = f"name and {device}"
    if max(map(len, names)) > LONGEST_NAME:
        lines = [below, *(f"{n}  {plotting.label(name)}" for n, name in enumerate(names, 1))]
        below = "\n".join(part for line in lines for part in wrap(line, plotting.LONGEST_LINE))
        names = [str(n) for n in range(1, len(names) + 1)]
    turned = sum(map(len, names)) > LETTERS
    axes.set_xticks(range(len(rows)), names, rotation=90 if turned else 0, fontsize=7 if turned else 8.5)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(below, loc="left" if "\n" in below else None, fontsize=plotting.SMALL)


def draw_waterfall(axes: Axes, seconds: Mapping[str, float | None], step_s: float) -> None:
    """One bar below the other, with its share of the step. A bar begins where the one before it ends, and goes to the
    left if it is negative. seconds: by name, None: no bar"""
    shown = {name: value for name, value in seconds.items() if value is not None}
    ends = list(accumulate(shown.values()))
    for (name, value), start in zip(shown.items(), [0.0, *ends], strict=False):
        _, color, hatch = WATERFALL.get(name, COMPUTING)
        bar = axes.barh(name, value, left=start, color=color, hatch=hatch, **EDGE)
        axes.bar_label(bar, [f"{100 * value / step_s:+.0f} %"], padding=2, fontsize=7)
    axes.axvline(step_s, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds of a step")
