"""The figures of a report, each quantity over GPU counts, learning over epochs and time, and their files: PNG for the
screen, SVG and PDF for documents, and images inside the page within its bytes.

A marker is the merged value of the repeats, small dots are the repeats themselves, a bar is the interval of the median
where they are enough for one. Configurations without an attempt that ended ok are crosses above the data.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ddlbench.figures import curves, plotting, published
from ddlbench.figures.bars import SHARES, draw_bars, draw_breakdown, draw_predicted, draw_schedule, in_parts
from ddlbench.figures.learning import learning
from ddlbench.figures.panels import Panel, Plot, measured, panels, small_multiples, with_rows
from ddlbench.figures.plotting import Looks, looks_of
from ddlbench.results.rows import OWN
from ddlbench.results.tables.measurement import Measurement
from ddlbench.results.tables.quality import TargetCosts
from ddlbench.results.tables.tables import Tables
from ddlbench.texts import GIB, limited

PANELS_OF_A_FILE = 6  # fit a page of paper
MOST_FILES = 30  # of all figures; above this number each quantity has one file, because the others would take minutes
COLORS = 256  # of a PNG: a third of the bytes, and no difference that is seen in lines and letters
# What the other kinds of file say about how they were made, without the time: the same records give the same bytes.
METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "Producer": None}}
LARGEST_SVG = 300_000  # bytes; a figure beyond it is faster and smaller as PNG
ALL_SVG = 3_000_000
ALL_BYTES = 8_000_000  # of images; base64 adds a third


@dataclass(frozen=True)
class Drawing:
    """The figures by the names of their files; a plot of many panels has several, "speedup" and "speedup_2".

    plots: what each of them shows
    notes: what is not drawn
    """

    figures: dict[str, Figure] = field(default_factory=dict[str, Figure])
    plots: dict[str, Plot] = field(default_factory=dict[str, Plot])
    notes: list[str] = field(default_factory=list[str])


def make_figures(tables: Tables, targets: Sequence[TargetCosts] = (), baseline: bool = False) -> Drawing:
    """Every figure that the tables have values for; arguments as plots_of takes them."""
    notes = published.notes(panels(tables.measurements)) if baseline else []
    return drawing_of(list(plots_of(tables, targets=targets, baseline=baseline)), notes)


def plots_of(
    tables: Tables,
    drawn: Sequence[Measurement] | None = None,
    targets: Sequence[TargetCosts] = (),
    baseline: bool = False,
) -> Iterator[Plot]:
    """The figures of a report, also those that no panel has values for. Those of learning, which read all epochs, are
    the last ones of its measurements.

    drawn:    measurements of a study's figure; there are also the figures that only a study asks for: QUANTITY_bars,
              published_QUANTITY, memory_and_throughput, step_seconds, predicted_parts and schedule. None: a report's
    targets:  whose costs are shown
    baseline: whether to draw the papers' printed numbers beside the measured ones
    """
    rows = tables.measurements if drawn is None else drawn
    looks = looks_of(row.curve_key for row in tables.measurements)
    all_panels = panels(rows)
    shared = [part for panel in all_panels for part in small_multiples(panel)]
    for name, shown, quantity in _over_gpus(shared):
        yield Plot(name, shown, partial(curves.draw, looks=looks, quantity=quantity))
    yield published.by_source(shared)
    yield Plot("breakdown", in_parts(measured(shared, *SHARES)), draw_breakdown)
    if baseline or drawn is not None:
        yield from published.plots(shared, all_panels, looks, of_all_loaders=baseline)
    if drawn is not None:
        for name, shown, quantity in _over_gpus(all_panels):
            yield Plot(f"{name}_bars", in_parts(shown), partial(draw_bars, looks=looks, quantity=quantity))
        yield tradeoff(all_panels, looks)
        yield Plot("step_seconds", in_parts(measured(all_panels, *SHARES)), partial(draw_breakdown, seconds=True))
        yield Plot("predicted_parts", in_parts(measured(all_panels, "predicted_step_s")), draw_predicted)
        pipelines = {row["measurement"]: (panel, row) for panel in shared for row in panel.rows if row.passes}
        schedules = [
            replace(panel, lines=[*panel.lines, f"{row.curve} on {row.devices}"], base="", rows=[row])
            for panel, row in pipelines.values()
        ]
        yield Plot("schedule", schedules, draw_schedule)
    yield from learning(tables.learning, tables.epochs, rows, looks)
    for costs in targets:
        for cost in ("epochs", "seconds"):
            with_cost = {row["measurement"] for row in costs.rows if row[f"{cost}_to_target"] is not None}
            shown = with_rows(shared, lambda row, with_cost=with_cost: row["measurement"] in with_cost)
            quantity = curves.to_target(costs, cost)
            yield Plot(f"{cost}_to_{costs.target.text}", shown, partial(curves.draw, looks=looks, quantity=quantity))


def drawing_of(plots: Sequence[Plot], notes: Sequence[str] = ()) -> Drawing:
    """The figures of plots, without those that have no panel. notes: beside those on what is not drawn"""
    folded = [
        f"{', '.join(filter(None, (panel.model, *panel.lines)))}: {len(panel.folded)} curves are not drawn: "
        f"{', '.join(panel.folded)}"
        for plot in plots
        for panel in plot.panels
        if panel.folded
    ]
    drawing = Drawing(notes=[*dict.fromkeys(folded), *notes])
    files = sum(-(-len(plot.panels) // PANELS_OF_A_FILE) for plot in plots)
    with plotting.style():
        for plot in plots:
            file = plot.study or plot.name
            shown, others = limited(plot.panels, len(plot.panels) if files <= MOST_FILES else PANELS_OF_A_FILE)
            for start in range(0, len(shown), PANELS_OF_A_FILE):
                part = shown[start : start + PANELS_OF_A_FILE]
                figure = plotting.grid([(panel.model, [*panel.lines, panel.base]) for panel in part])
                for axes, panel in zip(figure.axes, part, strict=True):
                    plot.draw(axes, panel)
                plotting.arrange(figure)
                name = f"{file}_{start // PANELS_OF_A_FILE + 1}" if start else file
                drawing.figures[name], drawing.plots[name] = figure, plot
            if others:
                choice = "--only model=NAME or framework=A,B draws others"
                drawing.notes.append(f"{file}: {len(shown)} of {len(plot.panels)} panels are drawn; {choice}")
    return drawing


def _over_gpus(shared: Sequence[Panel]) -> list[tuple[str, Sequence[Panel], curves.Quantity]]:
    """The quantities over GPU counts: their names, and the panels that have them."""
    own_bases = [  # where they are others than the bases of the panel
        panel.against_own_bases()
        for panel in shared
        if any(
            row["speedup_vs_own_base"] is not None
            and row["own_base_gpus"] != row["gpus"]
            and row.base(panel.on_own_bases) != row.base(own=True)
            for row in panel.rows
        )
    ]
    ratios = [panel for panel in shared if any(row.has_ratios(panel.on_own_bases) for row in panel.rows)]
    plain = [replace(panel, base="") for panel in shared]  # for quantities that are no ratios
    throughput = [panel if panel in ratios else bare for panel, bare in zip(shared, plain, strict=True)]  # ideal lines
    # Without the panels of published measurements whose source does not state the column.
    epoch_time, memory = (
        [panel for panel in plain if panel.rows[0]["origin"] == OWN or measured([panel], column)]
        for column in ("epoch_time_s", "memory_allocated_peak_bytes")
    )
    return [
        ("throughput", throughput, curves.THROUGHPUT),
        ("speedup", ratios, curves.SPEEDUP),
        ("efficiency", ratios, curves.EFFICIENCY),
        ("speedup_own_base", own_bases, curves.SPEEDUP),
        ("efficiency_own_base", own_bases, curves.EFFICIENCY),
        ("epoch_time", epoch_time, curves.EPOCH_TIME),
        ("memory", memory, curves.MEMORY),
        ("energy", measured(plain, "energy_sample_j"), curves.ENERGY),
        ("bubble", measured(plain, "bubble"), curves.BUBBLE),
        ("staleness", measured(plain, "staleness_theoretical_max"), curves.STALENESS),
        ("predicted", measured(plain, "predicted_step_s"), curves.PREDICTED),
    ]


def tradeoff(shown: Sequence[Panel], looks: Looks) -> Plot:
    """One marker for each row with a throughput and a peak of memory, those of all frameworks in one panel. The grey
    line joins the rows that no other one beats: each other row that is faster needs more memory."""

    def draw_rows(axes: Axes, panel: Panel) -> None:
        points = list[tuple[float, float]]()
        for name, rows in panel.curves.items():
            look = looks[rows[0].curve_key]
            of_curve = [(row[curves.memory_column(row["device"])] / GIB, 1 / row["sample_time_s"]) for row in rows]
            points += of_curve
            shape: dict[str, Any] = {**look.shape, "linestyle": ""}
            axes.plot(*zip(*of_curve, strict=True), color=look.color, label=plotting.label(name), zorder=3, **shape)
        axes.plot(*zip(*front(points), strict=True), color="#999999", linewidth=1, label="not beaten in both", zorder=2)
        axes.margins(0.08)
        axes.set_xlim(0)
        axes.set_ylim(0)
        axes.set_xlabel(curves.MEMORY.name(panel))
        plotting.value_name(axes, curves.THROUGHPUT.name(panel))

    rows = with_rows(shown, lambda row: row["sample_time_s"] and row[curves.memory_column(row["device"])] is not None)
    return Plot("memory_and_throughput", rows, draw_rows)


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (memory, throughput) that no other point beats or equals in both, from the smallest memory."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


def save(folder: Path, name: str, figure: Figure, pdf: bool = False) -> None:
    """NAME.png and NAME.svg of a figure. pdf: NAME.pdf too, which takes as long as both, because it embeds fonts"""
    folder.mkdir(parents=True, exist_ok=True)
    with plotting.style():
        stream = io.BytesIO()
        figure.savefig(stream, format="png", pil_kwargs={"compress_level": 0})
        with Image.open(stream) as image:
            # The default method gives most of the colors to what is drawn most, and none to a few green marks.
            method, dither = Image.Quantize.FASTOCTREE, Image.Dither.NONE
            few = image.convert("RGB").quantize(COLORS, method, dither=dither)
            few.save(folder / f"{name}.png", dpi=image.info["dpi"])
        for kind in ("svg", "pdf") if pdf else ("svg",):
            figure.savefig(folder / f"{name}.{kind}", metadata=METADATA[kind])


class Picture(NamedTuple):
    """A figure in the page. source: a data URL, or None where the page has no room for it; width: inches."""

    name: str
    source: str | None
    width: float


def pictures(figures: Mapping[str, Figure], folder: Path) -> list[Picture]:
    """The saved figures in `folder` as data URLs: SVG while they are small, then PNG."""
    left, left_svg = ALL_BYTES, ALL_SVG
    images: list[Picture] = []
    for name, figure in figures.items():
        kind, content = "svg+xml", (folder / f"{name}.svg").read_bytes()
        if len(content) > min(LARGEST_SVG, left_svg):
            kind, content = "png", (folder / f"{name}.png").read_bytes()
        source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}" if len(content) <= left else None
        left -= len(content) if source else 0
        left_svg -= len(content) if kind != "png" else 0
        images.append(Picture(name, source, figure.get_figwidth()))
    return images
