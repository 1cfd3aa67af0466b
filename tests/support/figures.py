"""Some of a report's figures: a test draws those that it looks at, because each takes a quarter of a second."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from ddlbench.figures.figures import drawing_of, plots_of
from ddlbench.results.tables.tables import Tables


def names_of(tables: Tables) -> set[str]:
    """The names of a report's figures, which are not drawn."""
    return {plot.name for plot in plots_of(tables) if plot.panels}


def figures_of(tables: Tables, *names: str, **options: Any) -> dict[str, Figure]:
    """The figures of these names. options: as plots_of takes them"""
    return drawing_of([plot for plot in plots_of(tables, **options) if plot.name in names]).figures
