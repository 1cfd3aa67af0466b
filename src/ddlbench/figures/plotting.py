"""Typography, a grid of panels of equal size, legends and axes, shared by all figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, log2
from textwrap import wrap
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddlbench.texts import shortened

STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # else each drawing looks for what the title might cover
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": "#222222",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6.5,
    "lines.markeredgewidth": 0.7,
    "savefig.dpi": 160,
    "text.parse_math": False,  # names are no formulas: $ is a letter
    "svg.hashsalt": "ddlbench",  # the same bytes for the same records
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3 fonts
}
IDEAL = {"color": "#8a8a8a", "linestyle": (0, (5, 3)), "linewidth": 1.2, "zorder": 1}
LOG_FROM = 4  # GPU counts: so many are on a log2 axis
LINEAR_UP_TO = 8  # fewer ones too, where they are further apart than this
COLUMNS = 2  # panels beside each other: readable on a page of paper
# Inches of a panel's axes, and of what is around them.
PANEL = (3.55, 2.5)
LEFT, RIGHT, BELOW, HEAD, LINE = 1.0, 0.2, 0.56, 0.34, 0.167
VALUE_NAME = -0.215  # the place of a value axis's name, left of numbers and statuses, as a share of the width
LEGEND_LINE = 0.19
LETTERS = 13  # of a legend, in one inch
TURNED_LETTER = 0.062  # inches of a letter of a bar's name that is written upwards
# What a figure has room for.
SHARED_LABELS = 12  # more than these are below their own panels
MOST_LABELS = 100
LONGEST_LABEL = 90
LONGEST_LINE = 56  # letters that are as wide as a panel
LONGEST_TEXT = 3 * LONGEST_LINE
LONGEST_TITLE = 44


@dataclass(frozen=True)
class Head:
    """The text above a panel: a bold line, and small lines below it."""

    title: str
    lines: list[str]


@dataclass(frozen=True)
class Grid:
    """A figure of panels, all of one size, COLUMNS beside each other."""

    figure: Figure
    axes: list[Axes]
    heads: list[Head]

    def arrange(self) -> Figure:
        """Place panels and legends when all is drawn; the figure becomes as high and wide as they need."""
        drawn = [_handles(panel) for panel in self.axes]
        shared = {text: handle for handles in drawn for text, handle in handles.items()}
        own_legends = len(shared) > SHARED_LABELS and len(drawn) > 1
        columns = min(COLUMNS, len(self.axes))
        step = LEFT + PANEL[0] + RIGHT
        width = max(columns * step, 0 if own_legends else (_longest(shared) + 6) / LETTERS)
        below = [_legend_inches(handles, step) if own_legends else 0.0 for handles in drawn]
        rows = [range(start, min(start + columns, len(drawn))) for start in range(0, len(drawn), columns)]
        tops = [HEAD + LINE * max(len(self.heads[n].lines) for n in row) for row in rows]
        legends = [max(below[n] for n in row) for row in rows]
        rooms = [max(_room_below(self.axes[n]) for n in row) for row in rows]
        bottom = 0.0 if own_legends else _legend_inches(shared, width)
        height = sum(tops) + sum(legends) + sum(rooms) + len(rows) * PANEL[1] + bottom
        self.figure.set_size_inches(width, height)
        y = height
        for row, top, legend, room in zip(rows, tops, legends, rooms, strict=True):
            y -= top + PANEL[1]
            for column, number in enumerate(row):
                x = column * step + LEFT
                self.axes[number].set_position((x / width, y / height, PANEL[0] / width, PANEL[1] / height))
                if own_legends:
                    _legend(self.figure, drawn[number], x - LEFT + 0.1, y - room, step)
            y -= room + legend
        if not own_legends:
            _legend(self.figure, shared, 0.1, y, width)
        return self.figure


def _room_below(axes: Axes) -> float:
    """Inches below a panel that the names of its ticks and of its axis take."""
    turned = [len(text.get_text()) for text in axes.get_xticklabels() if text.get_rotation()]
    return max(BELOW, 0.15 + TURNED_LETTER * max(turned, default=0))


def grid(heads: Sequence[Head]) -> Grid:
    """A figure with one panel for each head."""
    figure = Figure()
    axes = [figure.add_axes((0.1, 0.1, 0.8, 0.8), label=str(number)) for number in range(len(heads))]
    short = [Head(shortened(head.title, LONGEST_TITLE), _lines(head.lines)) for head in heads]
    for number, (panel, head) in enumerate(zip(axes, short, strict=True)):
        start = number - number % COLUMNS
        _title(panel, head, max(len(mate.lines) for mate in short[start : start + COLUMNS]))
    return Grid(figure, axes, short)


def _lines(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in wrap(shortened(line, LONGEST_TEXT), LONGEST_LINE)]


def _title(axes: Axes, head: Head, most: int) -> None:
    """most: lines of a head in this row of panels, whose titles are at one height"""
    axes.set_title(head.title, fontweight="bold", pad=8 + 12 * most)
    for number, line in enumerate(reversed(head.lines), start=most - len(head.lines)):
        axes.annotate(
            line, (0, 1), (0, 6 + 12 * number), xycoords="axes fraction", textcoords="offset points",
            fontsize=8, color="#555555",
        )  # fmt: skip


def _handles(axes: Axes) -> dict[str, Any]:
    """The entries of the panel's legend; equal labels once."""
    handles: dict[str, Any] = {}
    for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
        handles.setdefault(text, handle)
    more = len(handles) - MOST_LABELS
    return dict(list(handles.items())[:MOST_LABELS]) | ({f"and {more} more": Line2D([], [], ls="")} if more > 0 else {})


def _longest(labels: Iterable[str]) -> int:
    return max(map(len, labels), default=0)


def _legend_columns(labels: dict[str, Any], width: float) -> int:
    return max(1, min(int(width * LETTERS // (_longest(labels) + 6)), len(labels)))


def _legend_inches(labels: dict[str, Any], width: float) -> float:
    return LEGEND_LINE * -(-len(labels) // _legend_columns(labels, width)) + 0.12 if labels else 0.0


def _legend(figure: Figure, labels: dict[str, Any], x: float, y: float, width: float) -> None:
    """x, y: inches of the legend's upper left corner."""
    if labels:
        size = figure.get_size_inches()
        figure.legend(
            labels.values(), labels.keys(), loc="upper left", bbox_to_anchor=(x / size[0], y / size[1]),
            ncols=_legend_columns(labels, width), borderaxespad=0.0, columnspacing=1.2, fontsize=8.5,
        )  # fmt: skip


def paler(color: str, strength: float) -> tuple[float, float, float]:
    """A colour mixed with white: strength 1 leaves it as it is, 0 is white."""
    red, green, blue = to_rgb(color)
    return 1 - (1 - red) * strength, 1 - (1 - green) * strength, 1 - (1 - blue) * strength


def label(text: str) -> str:
    """A text as an entry of a legend: of bounded length, and visible even where it begins with an underscore."""
    return shortened(f" {text}" if text.startswith("_") else text, LONGEST_LABEL)


def log_counts(counts: Sequence[int], proportional: bool) -> bool:
    """Whether GPU counts are on a log2 axis. proportional: for a quantity that grows with them if scaling is ideal:
    with few counts a straight line on linear axes shows that best"""
    far = max(counts) / min(counts) > LINEAR_UP_TO
    return len(set(counts)) >= LOG_FROM or (far and not proportional)


def gpu_axis(axes: Axes, counts: Sequence[int], device: str | None, log: bool) -> None:
    """GPU counts at their positions, labelled by their numbers."""
    low, high = min(counts), max(counts)
    place: Callable[[float], float] = float
    if log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.25, high * 1.25)
        place = log2
    else:
        room = max(0.12 * (high - low), 0.4)
        axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(ticker.FixedLocator(_apart(sorted(set(counts)), place)))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel("ranks (CPU)" if device == "cpu" else "GPUs")


def _apart(counts: list[int], place: Callable[[float], float]) -> list[int]:
    """The counts whose labels do not overlap."""
    room = 0.055 * (place(counts[-1]) - place(counts[0]))
    kept: list[int] = []
    for count in counts:
        if not kept or place(count) - place(kept[-1]) > room:
            kept.append(count)
    return kept


def value_name(axes: Axes, name: str) -> None:
    """The name of the vertical axis, at the same place in all panels."""
    axes.set_ylabel(name)
    axes.yaxis.set_label_coords(VALUE_NAME, 0.5)


def value_axis(
    axes: Axes,
    values: Sequence[float],
    name: str,
    percents: bool,
    log: bool,
    band: float = 0.0,
    integers: bool = False,
) -> None:
    """Linear from 0, or logarithmic, to a little above the largest value; an axis without values says so.

    band: the share of the axis above all values that stays free for other marks
    integers: ticks at integers only
    """
    value_name(axes, name)
    if not values:
        axes.set_yticks([])
        axes.text(0.5, 0.4, "nothing measured", transform=axes.transAxes, ha="center", va="center", color="#555555")
        return
    write, top = percent if percents else plain, max(values) * 1.08 or 1.0
    if log:
        low = min(values) / 1.15
        axes.set_yscale("log")
        axes.set_ylim(low, top * (top / low) ** (band / (1 - band)))
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if top / low < 1000 else (1,)))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.set_ylim(0, top / (1 - band))
        if integers:
            axes.yaxis.set_major_locator(ticker.MaxNLocator("auto", integer=True))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(partial(_up_to, top if band else inf, write)))


def _up_to(top: float, write: Callable[[float], str], value: float, _: Any = None) -> str:
    """A tick's number, none above the top. A function of the module, which can be pickled."""
    return write(value) if value <= top else ""


def plain(value: float, _: Any = None) -> str:
    """A tick's number with thousands apart and no needless zeros."""
    return f"{value:,.10g}"


def percent(value: float, _: Any = None) -> str:
    """A share's tick in percent."""
    return f"{100 * value:.4g}"
