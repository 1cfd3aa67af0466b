"""Efficiency of published measurements over GPU counts, by strategy, GPU and source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from matplotlib.axes import Axes

from ddlbench.figures import plotting
from ddlbench.figures.panels import Panel
from ddlbench.figures.styles import looks_of
from ddlbench.results.reading.published import PUBLISHED, gpu_family
from ddlbench.results.rows import group_by
from ddlbench.results.tables.measurement import Measurement
from ddlbench.texts import first_few

LABEL = "efficiency over its base (%)"
SMALL: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.0}
MODELS_SHOWN = 4


class BySource:
    """A panel for each family of models ("ResNet" of "ResNet-50 v1.5"), with the published measurements on more GPUs
    than their base."""

    def __init__(self, shown: Sequence[Panel]) -> None:
        rows = {row["measurement"]: row for panel in shown for row in panel.rows if row["origin"] == PUBLISHED}
        scaled = [row for row in rows.values() if row["efficiency_vs_own_base"] and row["gpus"] > row["own_base_gpus"]]
        families = group_by(scaled, lambda row: re.split(r"[-_ ]", str(row["model"]), maxsplit=1)[0])
        self.panels: list[Panel] = []
        for family, same in sorted(families.items()):
            models = first_few(sorted({str(row["model"]) for row in same}), MODELS_SHOWN)
            self.panels.append(Panel(f"{family} ({PUBLISHED})", [", ".join(models)], "", same))
        self._looks = looks_of(_key(row) for row in scaled)

    def draw(self, axes: Axes, panel: Panel) -> None:
        """A line for each series, from its base at 100 %; those of one strategy, GPU and source look the same."""
        counts = [count for row in panel.rows for count in (row["gpus"], row["own_base_gpus"])]
        plotting.gpu_axis(axes, counts, panel.device, log=True)
        curves = group_by(panel.rows, _key)
        for (key, rows), look in zip(curves.items(), self._looks.of(list(curves)), strict=True):
            for series in group_by(rows, _series).values():
                ends = {(series[0]["own_base_gpus"], 1.0)}
                points = sorted(ends | {(row["gpus"], row["efficiency_vs_own_base"]) for row in series})
                style: dict[str, Any] = {"color": look.color, "label": plotting.label(key[1]), **look.shape, **SMALL}
                axes.plot([gpus for gpus, _ in points], [value for _, value in points], **style)
        axes.axhline(1.0, **cast(Any, plotting.IDEAL))
        values = [1.0, *(row["efficiency_vs_own_base"] for row in panel.rows)]
        plotting.value_axis(axes, values, LABEL, percents=True, log=False)


def _key(row: Measurement) -> tuple[str, str]:
    """The strategy, which has one colour, and the name in the legend."""
    gpu = gpu_family(str(row["device_model"])) or row["device_model"]
    return str(row["framework"]), f"{row['framework']}, {gpu}, {row['source']}"


def _series(row: Measurement) -> tuple[Any, ...]:
    """Equal for the points of a line."""
    names = (
        "model",
        "device_model",
        "framework_library",
        "precision",
        "loader",
        "own_base_gpus",
        "own_base_sample_time_s",
    )
    return tuple(row[name] for name in names)
