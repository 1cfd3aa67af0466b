"""The figures of a report: each quantity over GPU counts, learning over epochs and time.

A marker is the merged value of the repeats, small dots are the repeats themselves, a bar is the interval of the median
where they are enough for one. Configurations without an attempt that ended ok are crosses above the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlbench.figures import plotting
from ddlbench.figures.bars import breakdown_panels, draw_breakdown
from ddlbench.figures.curves import draw
from ddlbench.figures.learning import learning
from ddlbench.figures.panels import Panel, curve_key, panels, small_multiples
from ddlbench.figures.plotting import Head
from ddlbench.figures.published import (
    comparable,
    draw_communication,
    draw_efficiency,
    efficiencies,
    shares,
    sources,
    without_printed,
)
from ddlbench.figures.quantities import (
    BUBBLE,
    ENERGY,
    EPOCH_TIME,
    PREDICTED,
    STALENESS,
    THROUGHPUT,
    Quantity,
    efficiency,
    memory,
    speedup,
    to_target,
)
from ddlbench.figures.styles import Looks, looks_of
from ddlbench.results.rows import Row
from ddlbench.results.tables.tables import Tables
from ddlbench.results.tables.targets import COSTS, Target, costs, target_rows

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

    @property
    def files(self) -> int:
        return -(-len(self.shown) // PANELS_OF_A_FILE)


def make_figures(tables: Tables, targets: Sequence[Target] = (), baseline: bool = False) -> Drawing:
    """Every figure that the tables have values for.

    targets:  metrics to show the cost of
    baseline: whether to draw the papers' printed numbers beside the measured ones
    """
    runs = tables.run_rows
    scaling = tables.shown_rows
    looks = looks_of(map(curve_key, scaling))
    all_panels = panels(scaling, runs)
    shared = [part for panel in all_panels for part in small_multiples(panel)]
    learned = [Wanted(*parts) for parts in learning(tables.learning, tables.epochs, scaling, looks)]
    wanted = [
        *_scaling(shared, looks),
        *(_published(shared, all_panels, looks) if baseline else []),
        *learned,
        *(figure for target in targets for figure in _of_target(target, tables, runs, scaling, looks)),
    ]
    folded = [_folded(shared), *(_folded(figure.shown) for figure in learned)]
    printed = [f"published: {text}" for text in (*without_printed(all_panels), *sources())] if baseline else []
    drawing = Drawing(notes=[*dict.fromkeys(note for notes in folded for note in notes), *printed])
    every = sum(figure.files for figure in wanted) <= MOST_FILES
    with plotting.style():
        for figure in wanted:
            _add(drawing, figure, len(figure.shown) if every else PANELS_OF_A_FILE)
    return drawing


def _scaling(shared: Sequence[Panel], looks: Looks) -> list[Wanted]:
    """The figures over GPU counts."""
    own_bases = [panel.against_own_bases() for panel in shared if panel.own_bases_tell_more]
    ratios = [panel for panel in shared if panel.has_ratios]
    plain = _without_base(shared)
    over: list[tuple[str, Sequence[Panel], Callable[[Panel], Quantity]]] = [
        ("throughput", plain, _fixed(THROUGHPUT)),
        ("speedup", ratios, speedup),
        ("efficiency", ratios, efficiency),
        ("speedup_own_base", own_bases, speedup),
        ("efficiency_own_base", own_bases, efficiency),
        ("epoch_time", plain, _fixed(EPOCH_TIME)),
        ("memory", plain, memory),
        ("energy", _measured(plain, "energy_sample_j"), _fixed(ENERGY)),
        ("bubble", _measured(plain, "bubble"), _fixed(BUBBLE)),
        ("staleness", _measured(plain, "staleness_theoretical_max"), _fixed(STALENESS)),
        ("predicted", _measured(plain, "predicted_step_s"), _fixed(PREDICTED)),
    ]
    figures = [Wanted(name, shown, _over_gpus(looks, quantity)) for name, shown, quantity in over]
    return [*figures, Wanted("breakdown", breakdown_panels(shared), draw_breakdown)]


def _published(shared: Sequence[Panel], all_panels: Sequence[Panel], looks: Looks) -> list[Wanted]:
    """The papers' printed numbers beside the measured ones."""
    ratios = comparable(shared, efficiencies, "own base; grey: printed, base 4 GPUs")
    times = comparable(
        _measured(shared, "comm_share") or all_panels, shares, "grey: printed shares of the kernels' time"
    )
    return [
        Wanted("published_efficiency", ratios, draw_efficiency(looks)),
        Wanted("published_communication", times, draw_communication(looks)),
    ]


def _of_target(
    wanted: Target, tables: Tables, runs: Sequence[Row], scaling: Sequence[Row], looks: Looks
) -> list[Wanted]:
    """Two figures: epochs and seconds to the target."""
    reached = costs(tables.epochs, wanted)
    merged = {row["measurement"]: row for row in target_rows(tables, wanted)}
    none: dict[str, float | None] = dict.fromkeys(COSTS)
    names = [f"{cost}_to_target" for cost in COSTS]
    costly = [
        run | {f"{name}_to_target": value for name, value in reached.get(run["path"], none).items()} for run in runs
    ]
    rows = [row | {name: merged.get(row["measurement"], {}).get(name) for name in names} for row in scaling]
    shown = [part for panel in panels(rows, costly) for part in small_multiples(panel)]
    return [
        Wanted(
            f"{cost}_to_{wanted.text}",
            _measured(_without_base(shown), f"{cost}_to_target"),
            _over_gpus(looks, _fixed(to_target(wanted.text, cost))),
        )
        for cost in ("epochs", "seconds")
    ]


def _without_base(shown: Sequence[Panel]) -> list[Panel]:
    """For quantities that are no ratios."""
    return [replace(panel, base="") for panel in shown]


def _measured(shown: Sequence[Panel], column: str) -> list[Panel]:
    """The panels that have a value of the column, with the rows that have one."""
    measured = [replace(panel, rows=[row for row in panel.rows if row.get(column) is not None]) for panel in shown]
    return [panel for panel in measured if panel.rows]


def _folded(shown: Sequence[Panel]) -> list[str]:
    """The curves that no panel has room for."""
    return [
        f"{panel.name}: {len(panel.folded)} curves are not drawn: {', '.join(panel.folded)}"
        for panel in shown
        if panel.folded
    ]


def _fixed(quantity: Quantity) -> Callable[[Panel], Quantity]:
    return lambda _: quantity


def _over_gpus(looks: Looks, choose: Callable[[Panel], Quantity]) -> DrawPanel:
    return lambda axes, panel: draw(axes, panel, looks, choose(panel))


def _add(drawing: Drawing, wanted: Wanted, most: int) -> None:
    """The figures of one quantity: none where there is no panel. most: panels that are drawn"""
    drawn = wanted.shown[:most]
    for start in range(0, len(drawn), PANELS_OF_A_FILE):
        part = drawn[start : start + PANELS_OF_A_FILE]
        grid = plotting.grid([Head(panel.model, [*panel.lines, panel.base]) for panel in part])
        for axes, panel in zip(grid.axes, part, strict=True):
            wanted.draw_panel(axes, panel)
        number = start // PANELS_OF_A_FILE + 1
        name = wanted.name if number == 1 else f"{wanted.name}_{number}"
        drawing.figures[name] = grid.arrange()
    if len(drawn) < len(wanted.shown):
        drawing.notes.append(
            f"{wanted.name}: {len(drawn)} of {len(wanted.shown)} panels are drawn; --only model=NAME or "
            "framework=A,B draws others"
        )
