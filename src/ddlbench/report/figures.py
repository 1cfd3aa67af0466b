"""The figures of a report: each quantity over GPU counts, learning over epochs and time.

A marker is the merged value of the repeats, small dots are the repeats themselves, a bar is the interval of the median
where they are enough for one. Configurations without an attempt that ended ok are crosses above the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlbench.report import plotting
from ddlbench.report.bars import breakdown_panels, draw_breakdown
from ddlbench.report.curves import draw
from ddlbench.report.labels import marked
from ddlbench.report.learning import learning
from ddlbench.report.looks import Looks, looks_of
from ddlbench.report.merge import Row
from ddlbench.report.panels import Panel, curve_key, panels, small_multiples
from ddlbench.report.plotting import Head
from ddlbench.report.published import comparable, draw_communication, draw_efficiency, efficiencies, shares, sources
from ddlbench.report.quantities import (
    BUBBLE,
    ENERGY,
    EPOCH_TIME,
    PREDICTED,
    THROUGHPUT,
    Quantity,
    efficiency,
    memory,
    speedup,
    to_target,
)
from ddlbench.report.tables import Tables, records
from ddlbench.report.targets import COSTS, Target, costs, target_rows

PANELS_OF_A_FILE = 6  # fit a page of paper
MOST_PANELS = 24  # with more of them, a figure has one file: the others would take minutes

DrawPanel = Callable[[Axes, Panel], None]


@dataclass(frozen=True)
class Drawing:
    """The figures by name; a figure of many panels has several, "speedup" and "speedup_2". notes: what is not drawn."""

    figures: dict[str, Figure] = field(default_factory=dict[str, Figure])
    notes: list[str] = field(default_factory=list[str])


def make_figures(tables: Tables, targets: Sequence[Target] = (), baseline: bool = False) -> Drawing:
    """Every figure that the tables have something for.

    targets:  metrics to show the cost of
    baseline: whether to draw the papers' printed numbers beside one's own
    """
    runs = records(tables.runs)
    scaling = marked(records(tables.scaling), runs)
    looks = looks_of(map(curve_key, scaling))
    drawing = Drawing()
    with mpl.rc_context(cast(Any, plotting.STYLE)):
        whole = panels(scaling, runs)
        shared = [part for panel in whole for part in small_multiples(panel)]
        own = [panel.against_own_bases() for panel in shared if panel.own_bases_tell_more]
        drawing.notes.extend(_folded(shared))
        for name, shown, quantity in (
            ("throughput", _without_base(shared), lambda _: THROUGHPUT),
            ("speedup", shared, speedup),
            ("efficiency", shared, efficiency),
            ("speedup_own_base", own, speedup),
            ("efficiency_own_base", own, efficiency),
            ("epoch_time", _without_base(shared), lambda _: EPOCH_TIME),
            ("memory", _without_base(shared), memory),
            ("energy", _measured(_without_base(shared), "energy_sample_j"), lambda _: ENERGY),
            ("bubble", _measured(_without_base(shared), "bubble"), lambda _: BUBBLE),
            ("predicted", _measured(_without_base(shared), "predicted_step_s"), lambda _: PREDICTED),
        ):
            _add(drawing, name, shown, _over_gpus(looks, quantity))
        _add(drawing, "breakdown", breakdown_panels(shared), draw_breakdown)
        if baseline:
            _add(drawing, "published_efficiency", comparable(shared, efficiencies), draw_efficiency(looks))
            _add(drawing, "published_communication", comparable(whole, shares), draw_communication)
            drawing.notes.extend(f"published: {text}" for text in sources())
        for name, shown, draw_panel in learning(tables.learning, tables.epochs, scaling, looks):
            drawing.notes.extend(_folded(shown))
            _add(drawing, name, shown, draw_panel)
        for wanted in targets:
            _add_target(drawing, wanted, tables, scaling, looks)
    return drawing


def _add_target(drawing: Drawing, wanted: Target, tables: Tables, scaling: Sequence[Row], looks: Looks) -> None:
    """Two figures: epochs and seconds to the target."""
    reached = costs(tables.epochs, wanted)
    merged = {row["measurement"]: row for row in target_rows(tables, wanted)}
    none: dict[str, float | None] = dict.fromkeys(COSTS)
    runs = [run | _suffixed(reached.get(run["path"], none)) for run in records(tables.runs)]
    rows = [row | _costs_of(merged.get(row["measurement"])) for row in scaling]
    shown = [part for panel in panels(rows, runs) for part in small_multiples(panel)]
    for cost in ("epochs", "seconds"):
        known = _measured(_without_base(shown), f"{cost}_to_target")
        quantity = to_target(wanted.text, cost)
        _add(drawing, f"{cost}_to_{wanted.text}", known, _over_gpus(looks, lambda _, quantity=quantity: quantity))


def _suffixed(values: Mapping[str, float | None]) -> Row:
    return {f"{name}_to_target": value for name, value in values.items()}


def _costs_of(row: Row | None) -> Row:
    return {f"{name}_to_target": row and row[f"{name}_to_target"] for name in COSTS}


def _without_base(shown: Sequence[Panel]) -> list[Panel]:
    """For quantities that are no ratios."""
    return [replace(panel, base="") for panel in shown]


def _measured(shown: Sequence[Panel], column: str) -> list[Panel]:
    """The panels that have a value of the column, with the rows that have one."""
    known = [replace(panel, rows=[row for row in panel.rows if row.get(column) is not None]) for panel in shown]
    return [panel for panel in known if panel.rows]


def _folded(shown: Sequence[Panel]) -> list[str]:
    """The curves that no panel has room for."""
    return [
        f"{panel.name}: {len(panel.folded)} curves are not drawn: {', '.join(panel.folded)}"
        for panel in shown
        if panel.folded
    ]


def _over_gpus(looks: Looks, choose: Callable[[Panel], Quantity]) -> DrawPanel:
    def draw_panel(axes: Axes, panel: Panel) -> None:
        draw(axes, panel, looks, choose(panel))

    return draw_panel


def _add(drawing: Drawing, name: str, shown: Sequence[Panel], draw_panel: DrawPanel) -> None:
    """The figures of one quantity: none where there is no panel."""
    drawn = shown if len(shown) <= MOST_PANELS else shown[:PANELS_OF_A_FILE]
    for start in range(0, len(drawn), PANELS_OF_A_FILE):
        part = drawn[start : start + PANELS_OF_A_FILE]
        grid = plotting.grid([Head(panel.model, [*panel.lines, panel.base]) for panel in part])
        for axes, panel in zip(grid.axes, part, strict=True):
            draw_panel(axes, panel)
        number = start // PANELS_OF_A_FILE + 1
        drawing.figures[name if number == 1 else f"{name}_{number}"] = grid.arrange()
    if len(drawn) < len(shown):
        drawing.notes.append(
            f"{name}: {len(drawn)} of {len(shown)} panels are drawn; --only model=NAME or framework=A,B draws others"
        )
