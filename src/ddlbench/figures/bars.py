"""Where the time of a step goes: stacked bars of the shares of the profiled windows, by GPU count; the waterfall of one
run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ddlbench.figures import plotting
from ddlbench.figures.panels import Panel, measured
from ddlbench.results.tables.breakdown import PARTS
from ddlbench.texts import shortened

LOOKS = {  # of each part: its name in words, a colour and a hatching
    "forward": ("forward", "#56B4E9", ""),
    "backward": ("backward", "#0072B2", ""),
    "update": ("update", "#009E73", ""),
    "other_compute": ("other computing", "#B8D8BE", ""),
    "comm_exposed": ("exposed communication", "#D55E00", "//"),
    "data": ("waiting for data", "#E69F00", ".."),
    "idle": ("idle", "#d9d9d9", ""),
}
MOST_BARS = 24  # beside each other in one panel
HEAD, TAIL = 6, 9  # letters of a longer name
LONGEST_NAME = 40


def breakdown_panels(shown: Sequence[Panel]) -> list[Panel]:
    """The panels with the rows that have a profiled window; several for one that has too many bars."""
    parts: list[Panel] = []
    for panel in measured(shown, *(f"{part}_share" for part in PARTS)):
        rows = sorted(panel.rows, key=lambda row: (row.curve, row["gpus"]))
        count = -(-len(rows) // MOST_BARS)
        for n in range(count):
            lines = [*panel.lines, *([f"part {n + 1} of {count}"] if count > 1 else [])]
            parts.append(replace(panel, lines=lines, rows=rows[n * MOST_BARS : (n + 1) * MOST_BARS]))
    return parts


def draw_breakdown(axes: Axes, panel: Panel) -> None:
    """One bar for each framework and GPU count."""
    rows = panel.rows
    below = [0.0] * len(rows)
    for part in PARTS:
        name, color, hatch = LOOKS[part]
        shares = [row[f"{part}_share"] for row in rows]
        axes.bar(
            range(len(rows)), shares, 0.8, below, color=color, hatch=hatch, label=name, edgecolor="white", linewidth=0.4
        )
        below = [low + share for low, share in zip(below, shares, strict=True)]
    several = len(panel.curves) > 1
    names = [f"{_short(row.curve)} {row['gpus']}" if several else str(row["gpus"]) for row in rows]
    turned = len(rows) > 4 and several
    axes.set_xticks(range(len(rows)), names, rotation=90 if turned else 0, fontsize=7 if turned else 8.5)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(FuncFormatter(plotting.percent))
    plotting.value_name(axes, "share of a step's time (%)")
    if not turned:
        curve = "" if several else f", {shortened(rows[0].curve, LONGEST_NAME)}"
        axes.set_xlabel(("ranks (CPU)" if panel.device == "cpu" else "GPUs") + curve)


def draw_waterfall(axes: Axes, seconds: Mapping[str, float | None], step_s: float) -> None:
    """One bar below the other, each from the end of the one before it. seconds: by name, None: no bar"""
    shown = {name: value for name, value in seconds.items() if value is not None}
    ends = list(accumulate(shown.values()))
    axes.barh(list(shown), list(shown.values()), left=[0.0, *ends[:-1]])
    axes.axvline(step_s, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")


def _short(name: str) -> str:
    """The ends of a name: its knobs differ at the end."""
    return name if len(name) <= HEAD + TAIL else f"{name[:HEAD]}…{name[-TAIL:]}"
