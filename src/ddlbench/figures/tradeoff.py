"""Memory against throughput: what one setting gives up for the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from matplotlib.axes import Axes

from ddlbench.figures import plotting
from ddlbench.figures.panels import Panel, Plot, with_rows
from ddlbench.figures.quantities import MEMORY, THROUGHPUT, memory_column
from ddlbench.figures.styles import Looks


def tradeoff(shown: Iterable[Panel], looks: Looks) -> Plot:
    """One marker for each row with a throughput and a peak of memory, those of all frameworks in one panel."""
    rows = with_rows(list(shown), lambda row: row["sample_time_s"] and row[memory_column(row["device"])] is not None)
    return Plot("memory_and_throughput", rows, lambda axes, panel: _draw(axes, panel, looks))


def _draw(axes: Axes, panel: Panel, looks: Looks) -> None:
    """The grey line joins the rows that no other one beats: each other row that is faster needs more memory."""
    points = list[tuple[float, float]]()
    for (name, rows), look in zip(panel.curves.items(), looks.of(panel.curve_keys), strict=True):
        of_curve = [(cast(float, MEMORY.values(panel, row).merged), 1 / row["sample_time_s"]) for row in rows]
        points += of_curve
        shape: dict[str, Any] = {**look.shape, "linestyle": ""}
        xs, ys = zip(*of_curve, strict=True)
        axes.plot(xs, ys, color=look.color, label=plotting.label(name), zorder=3, **shape)
    axes.plot(*zip(*front(points), strict=True), color="#999999", linewidth=1, label="not beaten in both", zorder=2)
    axes.margins(0.08)
    axes.set_xlabel(MEMORY.name(panel))
    plotting.value_name(axes, THROUGHPUT.name(panel))


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (memory, throughput) that no other point beats or equals in both, from the smallest memory."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best
