"""Stacked bars of where the time goes."""

from __future__ import annotations

from typing import Any, cast

import matplotlib.figure
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddlbench.figures import plotting
from ddlbench.figures.bars import LOOKS, draw_bars, draw_breakdown, draw_predicted, in_parts
from ddlbench.figures.curves import Quantity, Values
from ddlbench.figures.panels import Panel, measured
from ddlbench.figures.plotting import looks_of
from ddlbench.results.tables.measurement import Measurement
from ddlbench.results.tables.scaling import PARTS

NAMES = [f"{part}_share" for part in PARTS]
SHARES = dict(zip(NAMES, (0.2, 0.4, 0.1, 0.05, 0.15, 0.06, 0.04), strict=True))


def row(gpus, **others):
    """A measurement. others: columns; knobs, across and layout as settings, such as "a=1 b=2" """
    texts = {name: others.pop(name, "").split() for name in ("knobs", "across", "layout")}
    settings = {name: dict(pair.split("=") for pair in pairs) for name, pairs in texts.items()}
    reference = {"framework": "ddp", "compared": "ddp", "gpus": gpus, "device": "cuda", "status": "ok"}
    return Measurement(reference | dict.fromkeys(NAMES) | others, settings=settings)


def drawn(rows, draw=draw_breakdown, model="resnet50", **options):
    """The axes of a panel."""
    axes = matplotlib.figure.Figure().add_subplot()
    draw(axes, Panel(model, [], "", rows), **options)
    return axes


def labels(axes):
    return [text.get_text() for text in axes.get_xticklabels()]


def heights(axes):
    """The heights of the bars of each part, from bottom to top."""
    return [[bar.get_height() for bar in container] for container in axes.containers]


def test_a_bar_for_each_row_with_a_window_that_adds_up_to_one():
    shown = [Panel("resnet50", [], "base", [row(4, **SHARES), row(2, **SHARES), row(8)])]
    (panel,) = in_parts(measured(shown, *NAMES))
    assert [row["gpus"] for row in panel.rows] == [2, 4]
    axes = drawn(panel.rows)
    assert labels(axes) == ["2", "4"]
    assert [height[0] for height in heights(axes)] == pytest.approx(list(SHARES.values()))
    top = axes.containers[-1][0]
    assert top.get_y() + top.get_height() == pytest.approx(1)
    assert measured([Panel("resnet50", [], "", [row(8)])], *NAMES) == [], "no window, no panel"


def test_no_bar_is_dropped_where_they_are_many():
    rows = [row(2**n, compared=name, **SHARES) for name in ("ddp", "fsdp", "zero3") for n in range(9)]
    parts = in_parts([Panel("resnet50", ["weak"], "", rows)])
    assert [part.lines[-1] for part in parts] == ["part 1 of 2", "part 2 of 2"]
    first, last = (drawn(part.rows) for part in parts)
    result = [*labels(first), *(f"zero3 {gpus}" for gpus in labels(last))]
    assert result == [f"{name} {2**n}" for name in ("ddp", "fsdp", "zero3") for n in range(9)]
    assert last.get_xlabel() == "GPUs, zero3", "the name of a single curve"


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([{"knobs": f"zero_stage={n} bucket=5"} for n in (1, 2)], ["ddp (zero_stage=1)", "ddp (zero_stage=2)"]),
        ([{"across": f"data=text recipe.optimizer.fused={n}"} for n in (1, 2)], ["ddp (fused=1)", "ddp (fused=2)"]),
        (
            [{"across": f"a.n={one} b.n={two}"} for one, two in ((1, 1), (2, 1), (1, 2))],
            ["ddp (a.n=1 b.n=1)", "ddp (a.n=2 b.n=1)", "ddp (a.n=1 b.n=2)"],
        ),
        ([{"across": f"scaling={n} batch=16"} for n in ("weak", "strong")], ["ddp (weak)", "ddp (strong)"]),
        ([{"layout": "dp=1 tp=4"}, {"layout": "dp=2 tp=2"}], ["ddp", "ddp (dp=2 tp=2)"]),
        ([{"layout": "dp=1 tp=4"}, {"layout": "dp=4 tp=1"}], ["ddp", "ddp (dp=4)"]),
        ([{"across": "scaling=weak"}, {"across": "scaling=strong", "compared": "gpipe"}], ["ddp", "gpipe"]),
    ],
    ids=["knobs", "short keys", "keys of one last part", "values", "layout", "replicas alone", "frameworks suffice"],
)
def test_bars_are_named_by_what_differs(rows, names):
    assert labels(drawn([row(4, **SHARES, **others) for others in rows], model="gpt2")) == names


def test_bars_with_long_names_are_numbered_and_listed_below():
    rows = [row(gpus, knobs=f"offload_optimizer_and_weights={gpus}", **SHARES) for gpus in (2, 4)]
    axes = drawn(rows, model="gpt2")
    assert labels(axes) == ["1", "2"]
    listed = [f"{n}  ddp (offload_optimizer_and_weights={gpus}) {gpus}" for n, gpus in ((1, 2), (2, 4))]
    assert axes.get_xlabel().split("\n") == ["name and GPUs", *listed]


def test_curves_of_one_color_have_one_entry_in_the_legend():
    rows = [row(4, knobs=f"bucket_cap_mb={n}") for n in (1, 25)]
    quantity = Quantity("speedup", lambda panel, row: Values(2.0, [2.0]))
    axes = drawn(rows, draw_bars, looks=looks_of(row.curve_key for row in rows), quantity=quantity)
    assert set(axes.get_legend_handles_labels()[1]) == {"ddp"}


def test_seconds_of_a_step_are_shares_of_the_profiled_step():
    rows = [row(2, profile_step_time_s=0.5, **SHARES), row(4, profile_step_time_s=0.25, **SHARES)]
    axes = drawn(rows, seconds=True)
    assert heights(axes) == [[pytest.approx(share / 2), pytest.approx(share / 4)] for share in SHARES.values()]
    assert axes.get_ylim()[1] > 0.5


def test_predicted_parts_stand_beside_the_measured_ones_without_waiting_for_data():
    """64 samples of 10 ms are 0.64 s, a quarter of which waits for data: 0.48 s. Of the window's 0.6 computing, 0.15
    communication and 0.05 idle, which are 0.8 of it, computing is 0.36 s and communication 0.09 s."""
    times = {"sample_time_s": 0.01, "global_batch": 64, "data_wait_share": 0.7, "data_wait_mean_share": 0.25}
    shares = {"compute_share": 0.6, "comm_exposed_share": 0.15, "idle_share": 0.05}
    predicted = {"predicted_compute_s": 0.3, "predicted_comm_exposed_s": 0.06, "predicted_bubble_s": 0.0}
    first = row(2, **times, **shares, **predicted, predicted_error=-0.25)
    undivided = dict.fromkeys(shares)
    second = row(4, **times, **undivided, **predicted, predicted_error=0.1)
    axes = drawn([first, second], draw_predicted)
    assert heights(axes) == [
        [pytest.approx(0.36), 0], [pytest.approx(0.09), 0], [pytest.approx(0.03), pytest.approx(0.48)],
        [0.3, 0.3], [0.06, 0.06],
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["75 %", "90 %"]


def test_a_window_that_only_waited_for_data_is_not_divided():
    shares = dict.fromkeys(("compute_share", "comm_exposed_share", "idle_share"), 0.0)
    predicted = {"predicted_compute_s": 0.3, "predicted_comm_exposed_s": 0.06, "predicted_bubble_s": 0.0}
    times = {"sample_time_s": 0.01, "global_batch": 64, "data_wait_share": 0.0, "data_wait_mean_share": 0.0}
    axes = drawn([row(2, **times, **shares, **predicted, predicted_error=0.0)], draw_predicted)
    assert heights(axes) == [[pytest.approx(0.64)], [0.3], [0.06]]


def test_a_bar_for_each_curve_with_its_repeats_and_the_status_of_a_failure():
    values = {"ddp": Values(2.0, [1.9, 2.1], (1.8, 2.2)), "zero2": Values(3.0, [3.0]), "tensor": None}
    rows = [row(4, compared=name, status="oom" if name == "tensor" else "ok") for name in values]
    quantity = Quantity("speedup", lambda panel, row: values[row["compared"]])
    axes = drawn(rows, draw_bars, looks=looks_of(row.curve_key for row in rows), quantity=quantity)
    assert heights(axes) == [[2.0], [3.0]]
    assert [[y for _, y in line.get_xydata().tolist()] for line in axes.lines] == [[1.9, 2.1], [3.0]]
    assert [text.get_text() for text in axes.texts] == ["oom"]
    assert labels(axes) == ["ddp", "zero2", "tensor"]
    assert axes.get_xlabel() == "on 4 GPUs"


def test_every_part_has_a_look_of_its_own():
    assert list(LOOKS) == list(PARTS)
    assert len(set(LOOKS.values())) == len({color for _, color, _ in LOOKS.values()}) == len(PARTS)


def test_long_names_of_bars_stay_above_the_next_panel():
    places = [(stage, gpus) for stage in (1, 2, 3) for gpus in (1024, 2048)]
    rows = [row(gpus, compared="deepspeed", knobs=f"zero_stage={stage}", **SHARES) for stage, gpus in places]
    with rc_context(cast(Any, plotting.STYLE)):
        figure = plotting.grid([(f"panel {number}", ["weak scaling"]) for number in range(4)])
        for axes in figure.axes:
            draw_breakdown(axes, Panel("resnet50", [], "", rows))
        plotting.arrange(figure)
        pixels = FigureCanvasAgg(figure).get_renderer()
        figure.draw(pixels)
    lowest = min(text.get_window_extent(pixels).y0 for text in figure.axes[0].get_xticklabels())
    assert lowest > figure.axes[2].title.get_window_extent(pixels).y1
