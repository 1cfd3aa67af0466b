"""Efficiency of published measurements over GPU counts, by strategy, GPU and source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from matplotlib.axes import Axes

from ddlbench.figures import plotting
from ddlbench.figures.panels import Panel, Plot
from ddlbench.figures.styles import Looks, looks_of
from ddlbench.results.reading.published import PUBLISHED, gpu_family
from ddlbench.results.rows import group_by
from ddlbench.results.tables.measurement import Measurement
from ddlbench.texts import first_few

LABEL = "efficiency over its base (%)"
SMALL: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.0}
PREDICTED: dict[str, Any] = {
    "linestyle": "", "marker": "_", "markersize": 11, "color": "black", "label": "predicted from its base", "zorder": 3,
}  # fmt: skip
MODELS_SHOWN = 4
SERIES = (  # columns that are equal for the points of a line
    "model", "device_model", "framework_library", "precision", "loader", "own_base_gpus", "own_base_sample_time_s",
)  # fmt: skip


def by_source(shown: Sequence[Panel]) -> Plot:
    """A panel for each family of models ("ResNet" of "ResNet-50 v1.5"), with the published measurements on more GPUs
    than their base."""
    rows = {row["measurement"]: row for panel in shown for row in panel.rows if row["origin"] == PUBLISHED}
    scaled = [row for row in rows.values() if row["efficiency_vs_own_base"] and row["gpus"] > row["own_base_gpus"]]
    families = group_by(scaled, lambda row: re.split(r"[-_ ]", str(row["model"]), maxsplit=1)[0])
    panels: list[Panel] = []
    for family, same in sorted(families.items()):
        models = first_few(sorted({str(row["model"]) for row in same}), MODELS_SHOWN)
        panels.append(Panel(f"{family} ({PUBLISHED})", [", ".join(models)], "", same))
    return Plot("efficiency_by_source", panels, partial(_draw, looks=looks_of(map(_key, scaled))))


def _draw(axes: Axes, panel: Panel, looks: Looks) -> None:
    """A line for each series, from its base at 100 %; those of one strategy, GPU and source look the same."""
    counts = [count for row in panel.rows for count in (row["gpus"], row["own_base_gpus"])]
    plotting.gpu_axis(axes, counts, panel.device, log=True)
    curves = group_by(panel.rows, _key)
    for (key, rows), look in zip(curves.items(), looks.of(list(curves)), strict=True):
        for series in group_by(rows, lambda row: tuple(row[name] for name in SERIES)).values():
            ends = {(series[0]["own_base_gpus"], 1.0)}
            points = sorted(ends | {(row["gpus"], row["efficiency_vs_own_base"]) for row in series})
            style: dict[str, Any] = {"color": look.color, "label": plotting.label(key[1]), **look.shape, **SMALL}
            axes.plot([gpus for gpus, _ in points], [value for _, value in points], **style)
    if predicted := [row for row in panel.rows if row["predicted_error"] is not None]:
        values = [row["efficiency_vs_own_base"] / (1 + row["predicted_error"]) for row in predicted]
        axes.plot([row["gpus"] for row in predicted], values, **PREDICTED)
    axes.axhline(1.0, **cast(Any, plotting.IDEAL))
    values = [1.0, *(row["efficiency_vs_own_base"] for row in panel.rows)]
    plotting.value_axis(axes, values, LABEL, percents=True, log=False)


def _key(row: Measurement) -> tuple[str, str]:
    """The strategy, which has one colour, and the name in the legend."""
    gpu = gpu_family(str(row["device_model"])) or row["device_model"]
    return str(row["framework"]), f"{row['framework']}, {gpu}, {row['source']}"
