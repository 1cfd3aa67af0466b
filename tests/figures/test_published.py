"""The papers' printed numbers, and published efficiencies from their bases."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.markers import CARETDOWNBASE, CARETUPBASE

from ddlbench.figures import plotting
from ddlbench.figures.figures import drawing_of, make_figures, plots_of
from ddlbench.figures.panels import panels
from ddlbench.figures.published import GREY, by_source, efficiencies, notes, shares
from tests.support.figures import figures_of
from tests.support.published import cells, csv_facts, store
from tests.support.records import tables_of, weak_scaling, write_run


def test_every_number_has_a_source_that_is_listed():
    listed = {line.split(":")[1].strip() for line in notes([])}
    for model in ("resnet50", "resnet101", "resnet152"):
        assert {point["source"] for point in efficiencies(model)} <= listed
        assert all(point["place"] for point in efficiencies(model))


def test_two_numbers_as_the_paper_prints_them():
    printed = [(row["loader"], row["value"]) for row in efficiencies("resnet50") if row["gpus"] == 1024]
    assert printed == [("dali, CPU", 0.76), ("dali, GPU", 0.68)]
    assert shares("resnet50")["native"][-1] == pytest.approx((512, 0.8261, 0.0366, 0.0552))
    assert shares("resnet50")["dali"][-1][:2] == (1024, pytest.approx(0.4618))


def test_shares_of_the_kernels_time_leave_room_for_other_kernels():
    for model in ("resnet50", "resnet101", "resnet152"):
        for rows in shares(model).values():
            assert all(sum(row[1:]) < 1 for row in rows)
            assert [row[0] for row in rows] == [4 * 2**n for n in range(len(rows))]


def test_drawn_beside_ones_own(tmp_path):
    weak_scaling(tmp_path)
    drawing = make_figures(tables_of(tmp_path), baseline=True)
    (axes,) = drawing.figures["published_efficiency"].axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert [[1, 1], [2, pytest.approx(1.875 / 2)], [4, pytest.approx(3.5 / 4)]] in drawn, "over the own base"
    assert [[1024, 0.76]] in drawn
    assert axes.get_xlim()[1] > 1024
    assert "Aach et al. 2023: ddp, native, < 44 %" in axes.get_legend_handles_labels()[1]
    limits = [bars.get_segments()[0].tolist() for bars in axes.collections if isinstance(bars, LineCollection)]
    assert limits == [[[256, 0.85], [256, pytest.approx(0.91)]], [[256, pytest.approx(0.38)], [256, 0.44]]]
    carets = [line for line in axes.lines if line.get_marker() in (CARETUPBASE, CARETDOWNBASE)]
    assert [line.get_markerfacecolor() for line in carets] == [GREY, GREY]
    assert axes.get_xlabel() == "GPUs"
    (axes,) = drawing.figures["published_communication"].axes
    assert "Aach et al. 2023, Table 2: ddp, native" in axes.get_legend_handles_labels()[1]
    assert len([line for line in axes.lines if np.size(line.get_xdata()) == 9]) == 1
    assert any("JUWELS Booster" in note for note in drawing.notes)


def test_a_figure_of_a_study_has_the_printed_efficiencies_of_its_models_and_loaders(tmp_path):
    for model in ("resnet50", "resnet152"):
        for gpus, rate in ((4, 400.0), (8, 700.0)):
            write_run(tmp_path, model=model, gpus=gpus, rate=rate, loader="dali", changed={"width_per_group": 32})
    tables = tables_of(tmp_path, by="model")
    (plot,) = [plot for plot in plots_of(tables, tables.measurements) if plot.name == "published_efficiency"]
    (axes,) = drawing_of([plot]).figures["published_efficiency"].axes
    printed = {line.get_label(): line.get_xydata().tolist() for line in axes.lines if line.get_color() == GREY}
    assert printed["resnet152, Aach et al. 2023: ddp, dali, CPU"] == [[1024, 0.81]]
    assert printed["resnet50, Aach et al. 2023: ddp, dali, GPU"] == [[1024, 0.68]]
    assert not [name for name in printed if "native" in name]


def test_the_papers_counts_are_of_gpus_beside_ranks_on_the_cpu_too(tmp_path):
    weak_scaling(tmp_path, device="cpu")
    names = ("published_efficiency", "published_communication")
    figures = figures_of(tables_of(tmp_path), *names, baseline=True)
    for name in names:
        assert figures[name].axes[0].get_xlabel() == "ranks (CPU); printed values: GPUs"


def test_where_each_number_stands_is_beside_the_figures(tmp_path):
    weak_scaling(tmp_path)
    listed = notes(panels(tables_of(tmp_path).measurements))
    (first,) = [note for note in listed if "text to Fig. 4" in note]
    assert "efficiency of resnet50, ddp, dali, CPU, 1024 GPUs = 76 %; efficiency of" in first
    assert not [note for note in listed if "no printed number" in note]


def test_a_model_without_printed_numbers_is_named(tmp_path):
    weak_scaling(tmp_path, model="vgg16")
    tables = tables_of(tmp_path)
    assert "published: no printed number is drawn beside vgg16" in notes(panels(tables.measurements))
    published = [plot for plot in plots_of(tables, baseline=True) if "published" in plot.name]
    assert [plot.panels for plot in published] == [[], []]


def test_ones_own_curves_have_their_looks_and_names(tmp_path):
    """Nine frameworks, in panels by family; the two stages of deepspeed are two curves."""
    names = ("ddp", "horovod", "local_sgd", "zero0", "fsdp", "zero1", "zero2", "zero3")
    runs = [(name, {}) for name in names] + [("deepspeed", {"zero_stage": stage}) for stage in (1, 2)]
    for framework, knobs in runs:
        for gpus in (2, 4):
            profile = {"profile": {"comm_share": 0.1 * gpus, "window_s": 1.0, "steps": 5}}
            write_run(tmp_path, framework=framework, knobs=knobs, gpus=gpus, sections=profile)
    write_run(tmp_path, framework="gpipe", gpus=2)
    name = "published_communication"
    parts = figures_of(tables_of(tmp_path), name, baseline=True)[name].axes
    drawn = [[line for line in axes.lines if line.get_color() != GREY] for axes in parts]
    assert [[line.get_label() for line in lines] for lines in drawn] == [
        ["ddp", "horovod", "local_sgd", "zero0"],
        ["deepspeed (zero_stage=1)", "deepspeed (zero_stage=2)", "fsdp", "zero1", "zero2", "zero3"],
    ]
    for lines in drawn:
        looks = {(line.get_color(), line.get_marker(), line.get_markerfacecolor()) for line in lines}
        assert len(looks) == len(lines)
        assert lines[0].get_xydata().tolist() == [[2, pytest.approx(0.2)], [4, pytest.approx(0.4)]]


@pytest.fixture
def figure(tmp_path):
    more = {"step_ms": "", "gpus_per_node": 8}
    rows = [
        cells(gpus=1, measured=100, global_batch=64, **more),
        cells(gpus=4, measured=388, global_batch=256, **more),
        cells(),
        cells(gpus=4, measured=180, base_value=50, global_batch=256, precision="fp32", **more),
        cells(model="ResNet-152", measured=240, base_value=40, strategy="FSDP", **more),
        cells(model="VGG-16", base_gpus="", base_value=""),
    ]
    store(tmp_path, csv_facts(tmp_path, *rows))
    weak_scaling(tmp_path / "own")
    return by_source(panels(tables_of(tmp_path).measurements))


def test_a_panel_for_each_family_of_models_with_a_base(figure):
    (panel,) = figure.panels
    assert (panel.model, panel.lines) == ("ResNet (published)", ["ResNet-152, ResNet-50"])
    assert sorted(row["gpus"] for row in panel.rows) == [4, 4, 8, 8], "the base itself is the start of a line"


def test_lines_start_at_their_bases(figure):
    (panel,) = figure.panels
    with plotting.style():
        (axes,) = plotting.grid([(panel.model, panel.lines)]).axes
        figure.draw(axes, panel)
    lines = [line for line in axes.lines if line.get_label() and not str(line.get_label()).startswith("_")]
    drawn = {(str(line.get_label()), tuple(map(tuple, line.get_xydata().tolist()))) for line in lines}
    ddp, fsdp = "DDP, V100, Example 2020", "FSDP, V100, Example 2020"
    expected = {(ddp, ((1, 100), (4, 97), (8, 95))), (ddp, ((1, 100), (4, 90))), (fsdp, ((1, 100), (8, 75)))}
    assert {(name, tuple((gpus, round(100 * share)) for gpus, share in points)) for name, points in drawn} == expected
    looks = {(str(line.get_label()), line.get_color(), line.get_marker()) for line in lines}
    assert len(looks) == 2


def test_a_prediction_above_all_measured_points_is_within_the_axis(figure):
    (panel,) = figure.panels
    panel.rows[0].row["predicted_error"] = -0.5
    with plotting.style():
        (axes,) = plotting.grid([(panel.model, panel.lines)]).axes
        figure.draw(axes, panel)
    assert axes.get_ylim()[1] > max(line.get_ydata().max() for line in axes.lines if line.get_linestyle() == "None")
