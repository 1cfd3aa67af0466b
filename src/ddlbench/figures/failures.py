"""Marks of what did not end ok: a band above all data, one line for each status, a cross at each GPU count."""

from __future__ import annotations

from typing import cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import offset_copy

from ddlbench.figures.panels import Panel, curve_name
from ddlbench.figures.styles import Look
from ddlbench.results.rows import Row, group_by
from ddlbench.texts import shortened

MOST_LINES = 4  # statuses of their own; the others share the last line
CROSSES_SHOWN = 7  # of one status at one GPU count
LINE = 0.075  # of the panel's height
STATUS_LETTERS = 12


def failed_lines(panel: Panel) -> dict[str, list[Row]]:
    """The rows without an attempt that ended ok, by status."""
    failed = [row for row in panel.rows if row["status"] != "ok"]
    groups = list(group_by(failed, lambda row: shortened(str(row["status"]), STATUS_LETTERS)).items())
    if len(groups) <= MOST_LINES:
        return dict(groups)
    others = [row for _, rows in groups[MOST_LINES - 1 :] for row in rows]
    return dict(groups[: MOST_LINES - 1]) | {"others": others}


def band(panel: Panel) -> float:
    """The share of the panel's height that the marks need."""
    lines = len(failed_lines(panel))
    return LINE * lines + 0.02 if lines else 0.0


def mark_failures(axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    """Draw the band. looks: by the name of the curve."""
    lines = failed_lines(panel)
    if lines:
        share = band(panel)
        axes.add_patch(Rectangle((0, 1 - share), 1, share, transform=axes.transAxes, color="#f4f2ef", zorder=2.5))
    for number, (status, rows) in enumerate(lines.items()):
        height = 1 - 0.01 - LINE * (number + 0.5)
        axes.annotate(
            status, (0, height), (-5, 0), xycoords="axes fraction", textcoords="offset points",
            ha="right", va="center", fontsize=7.5, color="#8a3324",
        )  # fmt: skip
        for gpus, mates in group_by(rows, lambda row: row["gpus"]).items():
            _crosses(axes, gpus, height, mates, looks)


def _crosses(axes: Axes, gpus: int, height: float, rows: list[Row], looks: dict[str, Look]) -> None:
    """Beside each other; a number for those without room."""
    shown = rows[:CROSSES_SHOWN]
    figure, place = cast(Figure, axes.figure), axes.get_xaxis_transform()
    for number, row in enumerate(shown):
        aside = offset_copy(place, figure, (number - (len(shown) - 1) / 2) * 6, units="points")
        look = looks[curve_name(row)]
        axes.plot(
            gpus, height, "x", transform=aside, color=look.color, markersize=5, markeredgewidth=1.6, clip_on=False,
            zorder=4,
        )  # fmt: skip
    if len(rows) > len(shown):
        more = f"+{len(rows) - len(shown)}"
        axes.annotate(
            more, (gpus, height), (3 * len(shown) + 2, 0), xycoords=place, textcoords="offset points",
            ha="left", va="center", fontsize=7, color="#333333",
        )  # fmt: skip
