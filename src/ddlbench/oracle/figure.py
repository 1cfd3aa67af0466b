"""The predictions as a figure in the report's style: samples a second over GPUs, and the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes

from ddlbench.errors import UserError
from ddlbench.oracle.predictor import Prediction
from ddlbench.report import plotting
from ddlbench.report.looks import PALETTE, looks_of
from ddlbench.report.plotting import Head

PARTS = {
    "computing": "compute_s",
    "exposed communication": "comm_exposed_s",
    "bubble": "bubble_s",
    "waiting for data": "data_s",
}
MOST = 6  # frameworks whose steps are drawn


def draw(rows: Sequence[Prediction], path: Path) -> None:
    """PNG and SVG beside each other. UserError where they cannot be written or nothing was predicted."""
    fine = [row for row in rows if row.status == "ok"]
    if not fine:
        raise UserError(f"--figure={path}: nothing was predicted")
    names = list(dict.fromkeys(row.framework for row in fine))
    with mpl.rc_context(cast(Any, plotting.STYLE)):
        first = Head(f"{fine[0].model} on {fine[0].cluster}", [f"from: {fine[0].basis}"])
        grid = plotting.grid([first, *(Head(name, []) for name in names[:MOST])])
        _throughput(grid.axes[0], fine, names)
        for panel, name in zip(grid.axes[1:], names, strict=False):
            _steps(panel, [row for row in fine if row.framework == name])
        figure = grid.arrange()
        try:
            for kind in ("png", "svg"):
                figure.savefig(path.with_suffix(f".{kind}"))
        except OSError as error:
            raise UserError(f"--figure={path} cannot be written ({error.strerror}): choose another file") from error


def _throughput(axes: Axes, rows: Sequence[Prediction], names: Sequence[str]) -> None:
    curves = [(name, name) for name in names]
    for name, look in zip(names, looks_of(curves).of(curves), strict=True):
        own = [row for row in rows if row.framework == name]
        gpus, rates = [row.gpus for row in own], [row.samples_per_s or 0.0 for row in own]
        axes.plot(gpus, rates, color=look.color, label=plotting.label(name), **look.shape)
    plotting.gpu_axis(axes, [row.gpus for row in rows], "cuda", log=True)
    rates = [row.samples_per_s for row in rows if row.samples_per_s]
    plotting.value_axis(axes, rates, "samples/s (predicted)", percents=False, log=True)


def _steps(axes: Axes, rows: Sequence[Prediction]) -> None:
    below = [0.0] * len(rows)
    places = [str(row.gpus) for row in rows]
    for color, (part, key) in zip(PALETTE, PARTS.items(), strict=False):
        heights = [getattr(row, key) or 0.0 for row in rows]
        axes.bar(places, heights, bottom=below, color=color, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xlabel("GPUs")
    plotting.value_name(axes, "s a step (predicted)")
