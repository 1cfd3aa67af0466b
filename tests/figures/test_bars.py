"""Stacked bars of where the time goes."""

from __future__ import annotations

from typing import Any, cast

import matplotlib.figure
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddlbench.figures import plotting
from ddlbench.figures.bars import LOOKS, breakdown_panels, draw_breakdown
from ddlbench.figures.panels import Panel
from ddlbench.results.tables.breakdown import PARTS
from ddlbench.results.tables.measurement import Measurement

NAMES = [f"{part}_share" for part in PARTS]
SHARES = dict(zip(NAMES, (0.2, 0.4, 0.1, 0.05, 0.15, 0.06, 0.04), strict=True))


def row(gpus, **others):
    reference = {
        "framework": "ddp",
        "compared": "ddp",
        "knobs": None,
        "across": None,
        "gpus": gpus,
        "device": "cuda",
        "status": "ok",
    }
    return Measurement(reference | dict.fromkeys(NAMES) | others)


def test_a_bar_for_each_row_with_a_window_that_adds_up_to_one():
    panel = Panel("resnet50", [], "base", [row(4, **SHARES), row(2, **SHARES), row(8)])
    (drawn,) = breakdown_panels([panel])
    assert [row["gpus"] for row in drawn.rows] == [2, 4]
    axes = matplotlib.figure.Figure().add_subplot()
    draw_breakdown(axes, drawn)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2", "4"]
    heights = [[bar.get_height() for bar in container] for container in axes.containers]
    assert [height[0] for height in heights] == pytest.approx(list(SHARES.values()))
    top = axes.containers[-1][0]
    assert top.get_y() + top.get_height() == pytest.approx(1)


def labels(axes):
    return [text.get_text() for text in axes.get_xticklabels()]


def test_no_bar_is_dropped_where_they_are_many():
    rows = [row(2**n, compared=name, **SHARES) for name in ("ddp", "fsdp", "zero3") for n in range(9)]
    parts = breakdown_panels([Panel("resnet50", ["weak"], "", rows)])
    assert [part.lines[-1] for part in parts] == ["part 1 of 2", "part 2 of 2"]
    result, axes = [], matplotlib.figure.Figure().add_subplot()
    for part in parts:
        axes = matplotlib.figure.Figure().add_subplot()
        draw_breakdown(axes, part)
        result += labels(axes) if len(labels(axes)) > 3 else [f"zero3 {gpus}" for gpus in labels(axes)]
    assert result == [f"{name} {2**n}" for name in ("ddp", "fsdp", "zero3") for n in range(9)]
    assert axes.get_xlabel() == "GPUs, zero3", "the name of a single curve"


def test_shortened_names_keep_what_differs():
    rows = [row(4, compared="deepspeed", knobs=f"zero_stage={stage}", **SHARES) for stage in (1, 2, 3)]
    axes = matplotlib.figure.Figure().add_subplot()
    draw_breakdown(axes, Panel("resnet50", [], "", rows))
    assert labels(axes) == [f"deepsp…_stage={stage}) 4" for stage in (1, 2, 3)]


def test_no_window_no_panel():
    assert breakdown_panels([Panel("resnet50", [], "", [row(2)])]) == []


def test_every_part_has_a_look_of_its_own():
    assert list(LOOKS) == list(PARTS)
    assert len(set(LOOKS.values())) == len({color for _, color, _ in LOOKS.values()}) == len(PARTS)


def test_long_names_of_bars_stay_above_the_next_panel():
    rows = [
        row(gpus, compared="deepspeed", knobs=f"zero_stage={stage}", **SHARES)
        for stage in (1, 2, 3)
        for gpus in (1024, 2048)
    ]
    with rc_context(cast(Any, plotting.STYLE)):
        figure = plotting.grid([plotting.Head(f"panel {number}", ["weak scaling"]) for number in range(4)])
        for axes in figure.axes:
            draw_breakdown(axes, Panel("resnet50", [], "", rows))
        plotting.arrange(figure)
        pixels = FigureCanvasAgg(figure).get_renderer()
        figure.draw(pixels)
    lowest = min(text.get_window_extent(pixels).y0 for text in figure.axes[0].get_xticklabels())
    assert lowest > figure.axes[2].title.get_window_extent(pixels).y1
