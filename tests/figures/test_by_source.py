"""The figure of published efficiencies: lines from their bases, one look for each strategy, GPU and source."""

from __future__ import annotations

import pytest

from ddlbench.figures import plotting
from ddlbench.figures.panels import panels
from ddlbench.figures.published import by_source
from tests.results.tables.test_published_rows import csv_facts, store
from tests.support import records
from tests.support.published import cells


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
    records.weak_scaling(tmp_path / "own")
    return by_source(panels(records.tables_of(tmp_path).measurements))


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
