"""What all figures share: typography, colours for colour-blind readers, a grid of panels, axes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Transform, offset_copy

from ddlbench.report.texts import shortened

STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
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
    "lines.markersize": 6,
    "savefig.dpi": 160,
    "text.parse_math": False,  # names are no formulas: $ is a letter
    "svg.hashsalt": "ddlbench",  # the same bytes for the same records
}
# Okabe and Ito's palette, without yellow, which white paper swallows.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.3)), (0, (7, 1.5, 1, 1.5)))
IDEAL = {"color": "#8a8a8a", "linestyle": (0, (5, 3)), "linewidth": 1.2, "zorder": 1}
PANEL_INCHES = (4.4, 3.3)
LINEAR_UP_TO = 8  # GPU counts further apart than this stand on a log2 axis
# What a figure has room for. PNG files end at 65,536 pixels.
MOST_PANELS = 60
MOST_LABELS = 100
LONGEST_LABEL = 90
LONGEST_LINE = 70
LONGEST_TITLE = 44


@dataclass(frozen=True)
class Look:
    """How a framework is drawn: one colour, and a first marker; its further curves use the next markers."""

    color: str
    first_marker: int

    def marker(self, number: int = 0) -> str:
        return MARKERS[(self.first_marker + 4 * number) % len(MARKERS)]


def looks_of(frameworks: Iterable[str]) -> dict[str, Look]:
    """One colour and marker a framework, the same in all figures of a report."""
    names = sorted(set(frameworks))
    return {name: Look(PALETTE[n % len(PALETTE)], n) for n, name in enumerate(names)}


def paler(color: str, strength: float) -> tuple[float, float, float]:
    """A colour mixed with white: strength 1 leaves it as it is, 0 is white."""
    red, green, blue = to_rgb(color)
    return 1 - (1 - red) * strength, 1 - (1 - green) * strength, 1 - (1 - blue) * strength


def earlier(names: Iterable[str]) -> list[int]:
    """For each name how many equal names came before: distinguishes curves of one framework."""
    seen: dict[str, int] = {}
    found: list[int] = []
    for name in names:
        found.append(seen.get(name, 0))
        seen[name] = found[-1] + 1
    return found


def grid(wanted: int) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, at most three in a row; if there are too many, it says how many are drawn."""
    panels = min(wanted, MOST_PANELS)
    columns = min(3, panels)
    rows = -(-panels // columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(max(width * columns, 5.4), height * rows + 0.2), layout="constrained")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(panels)]
    if panels < wanted:
        figure.suptitle(f"{panels} of {wanted} panels are drawn; the tables have all")
    return figure, axes


def label(text: str) -> str:
    """A text as an entry of a legend: of bounded length, and visible even where it begins with an underscore."""
    return shortened(f" {text}" if text.startswith("_") else text, LONGEST_LABEL)


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend below all panels; equal labels once."""
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, text in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    if handles:
        handles = _first(handles)
        room = figure.get_figwidth() * 13 // (max(len(text) for text in handles) + 8)  # about 13 letters an inch
        columns = max(1, min(int(room), len(handles)))
        lines = -(-len(handles) // columns)
        figure.set_figheight(figure.get_figheight() + 0.21 * lines)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def _first(handles: dict[str, Any]) -> dict[str, Any]:
    more = len(handles) - MOST_LABELS
    return dict(list(handles.items())[:MOST_LABELS]) | ({f"and {more} more": Line2D([], [], ls="")} if more > 0 else {})


def title(axes: Axes, head: str, rest: Iterable[str]) -> None:
    """A bold first line, and below it the small lines that are not empty."""
    lines = [shortened(line, LONGEST_LINE) for line in rest if line]
    axes.set_title(shortened(head, LONGEST_TITLE), fontweight="bold", pad=8 + 12 * len(lines))
    for number, line in enumerate(reversed(lines)):
        axes.annotate(
            line, (0, 1), (0, 6 + 12 * number), xycoords="axes fraction", textcoords="offset points",
            fontsize=8, color="#555555",
        )  # fmt: skip


def gpu_axis(axes: Axes, counts: Sequence[int], device: str | None, linear: bool) -> None:
    """GPU counts at their positions, labelled by their numbers. Counts that are far apart are on a log2 axis only where
    nothing is proportional to them: a straight line must mean a constant speedup a GPU."""
    low, high = min(counts), max(counts)
    ticks = sorted(set(counts))
    if not linear and high / low > LINEAR_UP_TO:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.25, high * 1.25)
    else:
        room = max(0.12 * (high - low), 0.4)
        axes.set_xlim(low - room, high + room)
        ticks = [tick for n, tick in enumerate(ticks) if n == 0 or tick - ticks[n - 1] > 0.03 * (high - low)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlabel("ranks (CPU)" if device == "cpu" else "GPUs")


def value_axis(axes: Axes, values: Sequence[float], name: str, percents: bool) -> None:
    """From 0 to a little above the largest value; an axis without values says so."""
    axes.set_ylabel(name)
    if values:
        axes.set_ylim(0, max(values) * 1.08 or 1)
        axes.yaxis.set_major_formatter(FuncFormatter(percent if percents else plain))
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", va="center", color="#555555")


def beside(axes: Axes, number: int, of: int) -> Transform:
    """Data coordinates moved sideways by a few points, so that equal values of several curves stay visible."""
    step = min(4.0, 16.0 / of)
    return offset_copy(axes.transData, cast(Figure, axes.figure), (number - (of - 1) / 2) * step, units="points")


def plain(value: float, _: Any = None) -> str:
    """A tick's number with thousands apart and no needless zeros."""
    return f"{value:,.10g}"


def percent(value: float, _: Any = None) -> str:
    """A share's tick in percent."""
    return f"{100 * value:.4g}"


def save(figures: dict[str, Figure], folder: Path) -> None:
    """NAME.png and NAME.svg of every figure."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(cast(Any, STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script: boxes, no crash
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", metadata={"Software": None})
            figure.set_layout_engine("none")  # the layout found for the PNG holds; finding it is the costly part
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
