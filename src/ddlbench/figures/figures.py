"""The figures of a report: each quantity over GPU counts, learning over epochs and time.

A marker is the merged value of the repeats, small dots are the repeats themselves, a bar is the interval of the median
where they are enough for one. Configurations without an attempt that ended ok are crosses above the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlbench.figures import plotting, published, quantities
from ddlbench.figures.bars import breakdown_panels, draw_breakdown
from ddlbench.figures.by_source import BySource
from ddlbench.figures.curves import draw
from ddlbench.figures.learning import learning
from ddlbench.figures.panels import Panel, panels, small_multiples
from ddlbench.figures.plotting import Head
from ddlbench.figures.styles import Looks, looks_of
from ddlbench.results.reading.published import OWN
from ddlbench.results.tables.measurement import Measurement
from ddlbench.results.tables.tables import Tables
from ddlbench.results.tables.targets import Target, costs, target_rows

PANELS_OF_A_FILE = 6  # fit a page of paper
MOST_FILES = 30  # of all figures; above this number each quantity has one file, because the others would take minutes

DrawPanel = Callable[[Axes, Panel], None]


@dataclass(frozen=True)
class Drawing:
    """The figures by name; a figure of many panels has several, "speedup" and "speedup_2". notes: what is not drawn."""

    figures: dict[str, Figure] = field(default_factory=dict[str, Figure])
    notes: list[str] = field(default_factory=list[str])


class Wanted(NamedTuple):
    """One quantity: the panels that have something of it, and how one is drawn."""

    name: str
    shown: Sequence[Panel]
    draw_panel: DrawPanel


def make_figures(tables: Tables, targets: Sequence[Target] = (), baseline: bool = False) -> Drawing:
    """Every figure that the tables have values for.

    targets:  metrics to show the cost of
    baseline: whether to draw the papers' printed numbers beside the measured ones
    """
    rows = tables.measurements
    looks = looks_of(row.curve_key for row in rows)
    all_panels = panels(rows)
    shared = [part for panel in all_panels for part in small_multiples(panel)]
    learned = [Wanted(*parts) for parts in learning(tables.learning, tables.epochs, rows, looks)]
    wanted = [
        *_scaling(shared, looks),
        *(_published(shared, all_panels, looks) if baseline else []),
        *learned,
        *(figure for target in targets for figure in _of_target(target, tables, shared, looks)),
    ]
    folded = [
        f"{panel.name}: {len(panel.folded)} curves are not drawn: {', '.join(panel.folded)}"
        for panel in (*shared, *(panel for figure in learned for panel in figure.shown))
        if panel.folded
    ]
    drawing = Drawing(notes=[*dict.fromkeys(folded), *(published.notes(all_panels) if baseline else [])])
    files = sum(-(-len(figure.shown) // PANELS_OF_A_FILE) for figure in wanted)
    with plotting.style():
        for figure in wanted:
            _add(drawing, figure, len(figure.shown) if files <= MOST_FILES else PANELS_OF_A_FILE)
    return drawing


def _scaling(shared: Sequence[Panel], looks: Looks) -> list[Wanted]:
    """The figures over GPU counts."""
    own_bases = [panel.against_own_bases() for panel in shared if panel.own_bases_tell_more]
    ratios = [panel for panel in shared if panel.has_ratios]
    plain = [replace(panel, base="") for panel in shared]  # for quantities that are no ratios
    over: list[tuple[str, Sequence[Panel], quantities.QuantityOf]] = [
        ("throughput", plain, quantities.THROUGHPUT),
        ("speedup", ratios, quantities.speedup),
        ("efficiency", ratios, quantities.efficiency),
        ("speedup_own_base", own_bases, quantities.speedup),
        ("efficiency_own_base", own_bases, quantities.efficiency),
        ("epoch_time", _own_or_stated(plain, "epoch_time_s"), quantities.EPOCH_TIME),
        ("memory", _own_or_stated(plain, "memory_allocated_peak_bytes"), quantities.memory),
        ("energy", _measured(plain, "energy_sample_j"), quantities.ENERGY),
        ("bubble", _measured(plain, "bubble"), quantities.BUBBLE),
        ("staleness", _measured(plain, "staleness_theoretical_max"), quantities.STALENESS),
        ("predicted", _measured(plain, "predicted_step_s"), quantities.PREDICTED),
    ]
    figures = [Wanted(name, shown, partial(draw, looks=looks, quantity=quantity)) for name, shown, quantity in over]
    by_source = BySource(shared)
    published_ones = Wanted("efficiency_by_source", by_source.panels, by_source.draw)
    return [*figures, published_ones, Wanted("breakdown", breakdown_panels(shared), draw_breakdown)]


def _published(shared: Sequence[Panel], all_panels: Sequence[Panel], looks: Looks) -> list[Wanted]:
    """The papers' printed numbers beside the measured ones."""
    ratios = published.comparable(shared, published.efficiencies, "own base; grey: printed, base 4 GPUs")
    times = published.comparable(
        _measured(shared, "comm_share") or all_panels, published.shares, "grey: printed shares of the kernels' time"
    )
    return [
        Wanted("published_efficiency", ratios, partial(published.draw_efficiency, looks=looks)),
        Wanted("published_communication", times, partial(published.draw_communication, looks=looks)),
    ]


def _of_target(target: Target, tables: Tables, shared: Sequence[Panel], looks: Looks) -> Iterator[Wanted]:
    """Two figures: epochs and seconds to the target."""
    rows, of_runs = target_rows(tables, target), costs(tables.epochs, target)
    for cost in ("epochs", "seconds"):
        reached = {row["measurement"] for row in rows if row[f"{cost}_to_target"] is not None}
        shown = _with_rows(shared, lambda row, reached=reached: row["measurement"] in reached)
        quantity = quantities.to_target(target.text, cost, rows, of_runs)
        yield Wanted(f"{cost}_to_{target.text}", shown, partial(draw, looks=looks, quantity=quantity))


def _measured(shown: Sequence[Panel], column: str) -> list[Panel]:
    """The panels that have a value of the column, with the rows that have one."""
    return _with_rows(shown, lambda row: row[column] is not None)


def _own_or_stated(shown: Sequence[Panel], column: str) -> list[Panel]:
    """Without the panels of published measurements whose source does not state the column."""
    return [panel for panel in shown if panel.rows[0]["origin"] == OWN or _measured([panel], column)]


def _with_rows(shown: Sequence[Panel], wanted: Callable[[Measurement], bool]) -> list[Panel]:
    """The panels with the rows that are wanted, without those that have none, for quantities that are no ratios."""
    parts = [replace(panel, base="", rows=list(filter(wanted, panel.rows))) for panel in shown]
    return [panel for panel in parts if panel.rows]


def _add(drawing: Drawing, wanted: Wanted, most: int) -> None:
    """The figures of one quantity: none where there is no panel. most: panels that are drawn"""
    drawn = wanted.shown[:most]
    for start in range(0, len(drawn), PANELS_OF_A_FILE):
        part = drawn[start : start + PANELS_OF_A_FILE]
        figure = plotting.grid([Head(panel.model, [*panel.lines, panel.base]) for panel in part])
        for axes, panel in zip(figure.axes, part, strict=True):
            wanted.draw_panel(axes, panel)
        plotting.arrange(figure)
        number = start // PANELS_OF_A_FILE + 1
        drawing.figures[wanted.name if number == 1 else f"{wanted.name}_{number}"] = figure
    if len(drawn) < len(wanted.shown):
        drawing.notes.append(
            f"{wanted.name}: {len(drawn)} of {len(wanted.shown)} panels are drawn; --only model=NAME or "
            "framework=A,B draws others"
        )
