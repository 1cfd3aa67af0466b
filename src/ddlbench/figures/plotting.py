"""What all figures share: typography, a grid of panels of equal size, legends, axes, and the colors and markers of
curves. A framework, or another factor that is compared, has one color for each value in a report; curves of one color
differ in their markers."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from textwrap import wrap
from typing import Any, cast

import matplotlib as mpl
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox, offset_copy

from ddlbench.results.rows import FAMILIES
from ddlbench.texts import first_few, shortened

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
COLUMNS = 2  # panels beside each other: readable on a page of paper
PANEL = (3.55, 2.5)  # inches of a panel's axes
PAD = 0.15  # inches around a panel with its texts
# Points from the lower left corner of a panel: a value axis's name, left of numbers and statuses; a legend of its own.
VALUE_NAME = (-55, 0)
LEGEND = (-60, -36)
LETTERS = 13  # of a legend, in one inch
DIGIT = 0.084  # inches of one below an axis
# What a figure has room for.
SHARED_LABELS = 12  # more than these are below their own panels
MOST_LABELS = 100
LONGEST_LABEL = 300
LABEL_LINE = 100
PATH = re.compile(r"(\w+\.)+(?=\w+=)")  # in front of a key: recipe.optimizer.
LONGEST_LINE = 56  # letters that are as wide as a panel
LONGEST_TEXT = 3 * LONGEST_LINE
LONGEST_TITLE = 44
SMALL, LINE = 8, 12  # points: letters of the lines below a title, and from one line to the next
# Okabe and Ito's palette, readable for color-blind people, without yellow: it is too pale on white paper.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.3)), (0, (7, 1.5, 1, 1.5)))
SHAPES = tuple((marker, filled) for filled in (True, False) for marker in MARKERS)


@contextmanager
def style() -> Generator[None]:
    """The style of all figures; a letter that the font lacks becomes a box, without a warning."""
    with mpl.rc_context(cast(Any, STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def grid(heads: Sequence[tuple[str, Sequence[str]]]) -> Figure:
    """A figure with one panel of the size PANEL for each head, which is a bold title and the small lines below it; the
    titles are at one height. `arrange` gives the panels their places."""
    figure = Figure(PANEL)
    FigureCanvasAgg(figure)  # its renderer measures texts; without one each measurement draws the figure
    short = [[shortened(line, LONGEST_TEXT) for line in below] for _, below in heads]
    texts = [[part for line in lines for part in wrap(line, LONGEST_LINE)] for lines in short]
    most = max(map(len, texts))
    for (title, _), lines in zip(heads, texts, strict=True):
        panel = figure.add_axes((0, 0, 1, 1))
        panel.set_title(shortened(title, LONGEST_TITLE), fontweight="bold", pad=8 + LINE * most)
        panel.annotate(
            "\n".join(lines), (0, 1), (0, 4 + LINE * most), xycoords="axes fraction", textcoords="offset points",
            fontsize=SMALL, color="#555555", va="top", linespacing=1.3,
        )  # fmt: skip
    return figure


def arrange(figure: Figure) -> None:
    """Add the legends when all panels are drawn, and place the panels, COLUMNS beside each other, with room for the
    texts around them; they become wider where the legend of the figure is."""
    panels, columns = figure.axes, min(COLUMNS, len(figure.axes))
    legends: list[dict[str, Any]] = []  # the handles of each panel by their labels
    for handles, texts in (panel.get_legend_handles_labels() for panel in panels):
        first = dict(zip(reversed(texts), reversed(handles), strict=True))
        shown = first_few(list(dict.fromkeys(texts)), MOST_LABELS)
        legends.append({text: first.get(text, Line2D([], [], ls="")) for text in shown})
    shared = {text: handle for legend in legends for text, handle in legend.items()}
    inches, widest, y = figure.dpi_scale_trans.inverted(), 0.0, PAD
    if len(shared) > SHARED_LABELS and len(panels) > 1:
        for panel, legend in zip(panels, legends, strict=True):
            corner = offset_copy(panel.transAxes, figure, *LEGEND, units="points")
            _legend(panel, legend, PANEL[0], loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=corner)
    elif shared:
        legend = _legend(figure, shared, columns * (PANEL[0] + 1), loc="lower left")
        box = legend.get_window_extent().transformed(inches)
        widest, y = box.x1 + PAD, box.y1 + PAD
    # Inches from the lower left corner of a panel: texts have a fixed size, wherever the panel is.
    boxes = [cast(Bbox, panel.get_tightbbox()).transformed(inches) for panel in panels]
    rows = [boxes[start : start + columns] for start in range(0, len(boxes), columns)]
    x, lefts, bottoms = PAD, list[float](), list[float]()
    for column in (boxes[number::columns] for number in range(columns)):
        lefts.append(x - min(box.x0 for box in column))
        x = lefts[-1] + max(box.x1 for box in column) + PAD
    for row in reversed(rows):
        bottoms.insert(0, y - min(box.y0 for box in row))
        y = bottoms[0] + max(box.y1 for box in row) + PAD
    wider = max(widest - x, 0.0) / columns
    figure.set_size_inches(width := x + columns * wider, y)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        left = (lefts[column] + column * wider) / width
        panel.set_position((left, bottoms[row] / y, (PANEL[0] + wider) / width, PANEL[1] / y))


def _legend(owner: Axes | Figure, labels: dict[str, Any], width: float, **place: Any) -> Legend:
    """Add a legend with as many columns as `width` inches hold."""
    texts = ["\n".join(wrap(text, LABEL_LINE, drop_whitespace=False)) for text in labels]
    column = (max((len(line) for text in texts for line in text.split("\n")), default=0) + 6) / LETTERS
    return owner.legend(
        list(labels.values()), texts, ncols=max(1, min(int(width // column), len(labels))),
        columnspacing=1.2, fontsize=8.5, borderaxespad=0.2, **place,
    )  # fmt: skip


def label(text: str) -> str:
    """A text as an entry of a legend: keys without their groups, of bounded length, and visible even where it begins
    with an underscore."""
    return shortened(f" {text}" if text.startswith("_") else PATH.sub("", text), LONGEST_LABEL)


def gpu_axis(axes: Axes, counts: Sequence[int], device: str | None, log: bool) -> None:
    """GPU counts at their positions, labelled by their numbers as far as these do not overlap."""
    low, high = min(counts), max(counts)
    if log:
        axes.set_xscale("log", base=2)
        # Curves beside each other take a quarter of the closest distance at most, and a tenth of the panel.
        closest = min((later / one for one, later in pairwise(sorted(set(counts)))), default=1.0)
        factor = max(min(closest**0.25, (high / low) ** 0.12), 1.25)
        axes.set_xlim(low / factor, high * factor)
    else:
        room = max(0.12 * (high - low), 0.4)
        axes.set_xlim(low - room, high + room)
    labelled, free = list[int](), 0.0  # free: inches right of the last label
    for count in sorted(set(counts)):
        place = PANEL[0] * (axes.transScale + axes.transLimits).transform((count, 1))[0]
        half = DIGIT * (len(str(count)) + 0.4) / 2  # with 0.4 digits between two labels
        if not labelled or place - half >= free:
            labelled.append(count)
            free = place + half
    axes.xaxis.set_major_locator(ticker.FixedLocator(labelled))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel(counted(device))


def counted(device: str | None) -> str:
    """What a GPU count of this kind of device counts."""
    return "ranks (CPU)" if device == "cpu" else "GPUs"


def value_name(axes: Axes, name: str) -> None:
    """The name of the vertical axis, at the same place in all panels."""
    axes.set_ylabel(name)
    left = offset_copy(axes.transAxes, cast(Figure, axes.figure), *VALUE_NAME, units="points")
    axes.yaxis.set_label_coords(0, 0.5, left)


def value_axis(
    axes: Axes, values: Sequence[float], name: str, percents: bool, log: bool, band: float = 0.0, integers: bool = False
) -> None:
    """Linear from 0, or logarithmic, to a little above the largest value; an axis without values says so.

    band: the share of the axis above all values that stays free
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
    highest = top if band else inf  # no number beside the band
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: write(value) if value <= highest else ""))


def plain(value: float, _: Any = None) -> str:
    """A tick's number with thousands apart and no needless zeros, as short as the room left of an axis."""
    return f"{value:,.10g}" if value < 1e7 else f"{value:.4g}"


def percent(value: float, _: Any = None) -> str:
    """A share's tick in percent."""
    return f"{100 * value:.4g}"


def family(framework: str) -> str:
    """The family of a framework, or of factors that begin with one; "other frameworks" for unknown names."""
    first = framework.partition(",")[0]
    return next((name for name, frameworks in FAMILIES.items() if first in frameworks), "other frameworks")


@dataclass(frozen=True)
class Look:
    """How a curve is drawn. filled: whether its markers are filled with the color, else with white."""

    color: str
    marker: str
    filled: bool = True
    dashes: int = 0

    @property
    def shape(self) -> dict[str, Any]:
        """Properties of the markers and of the line between them."""
        face = {} if self.filled else {"markerfacecolor": "white", "markeredgecolor": self.color}
        return {"marker": self.marker, "linestyle": DASHES[self.dashes], "markeredgecolor": "white", **face}


Looks = dict[tuple[str, str], Look]  # of all curves (framework, name) of a report


def numbered(names: Iterable[str]) -> dict[str, Look]:
    """Looks for the curves of one framework in a panel of its own: each has a color."""
    return {name: Look(PALETTE[n % len(PALETTE)], *SHAPES[n % len(SHAPES)]) for n, name in enumerate(names)}


def looks_of(curves: Iterable[tuple[str, str]], kept: Looks | None = None) -> Looks:
    """Looks of curves (framework, name): one color a framework, and a shape that no other curve of the color has, as
    far as the shapes go.

    kept: looks whose colors the frameworks keep
    """
    names = sorted(set(curves), key=lambda curve: (family(curve[0]), *curve))  # a family's colors differ
    frameworks = list(dict.fromkeys(framework for framework, _ in kept or names))
    taken: dict[str, set[tuple[str, bool]]] = {color: set() for color in PALETTE}
    looks: Looks = {}
    drawn = Counter[str]()
    for framework, name in names:
        number = frameworks.index(framework)
        color, start = PALETTE[number % len(PALETTE)], number % len(MARKERS)
        if len(taken[color]) == len(SHAPES):
            taken[color].clear()
        shape = next(shape for shape in (*SHAPES[start:], *SHAPES[:start]) if shape not in taken[color])
        taken[color].add(shape)
        looks[framework, name] = Look(color, *shape, dashes=drawn[framework] % len(DASHES))
        drawn[framework] += 1
    return looks
