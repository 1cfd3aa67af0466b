"""Rows become panels of comparable rows with one base."""

from __future__ import annotations

from itertools import product

from ddlbench.figures.figures import plots_of
from ddlbench.figures.panels import panels
from ddlbench.report.overview import base_lines
from ddlbench.results.tables.measurement import devices, duration
from tests.support.figures import names_of
from tests.support.records import CPU, GPU, strong_scaling, tables_of, weak_scaling, write_run


def panels_of(results):
    return panels(tables_of(results).measurements)


def bases(panel):
    return {(base.seconds, base.gpus) for base in (row.base(panel.on_own_bases) for row in panel.rows)}


def test_a_panel_a_model_and_kind_of_scaling(tmp_path):
    weak_scaling(tmp_path, repeats=2)
    strong_scaling(tmp_path)
    text, images = panels_of(tmp_path)
    assert (text.model, text.lines[0]) == ("gpt2_small", "strong scaling, 64 samples an update")
    assert text.base == "base: ddp on 2 GPUs, 100 ms a sample"
    assert (images.model, images.lines[0]) == ("resnet50", "weak scaling, 32 samples a GPU")
    assert images.base == "base: single on 1 GPU, 9.95 ms a sample"  # median of 1/100 and 1/101
    assert [len(rows) for rows in images.curves.values()] == [1, 4]
    assert [len(row.runs) for row in images.rows] == [2, 2, 2, 2, 0]


def test_a_panel_against_own_bases_has_their_times(tmp_path):
    weak_scaling(tmp_path)
    (panel,) = panels_of(tmp_path)
    assert bases(panel) == {(0.01, 1)}
    own = panel.against_own_bases()
    assert bases(own) == {(0.01, 1), (1 / 80, 1)}
    assert own.base == "base: each framework's own fewest GPUs"


def test_own_bases_add_nothing_where_they_are_the_same(tmp_path):
    write_run(tmp_path, gpus=1, rate=100.0)
    write_run(tmp_path, gpus=2, rate=150.0)
    assert "speedup" in (names := names_of(tables_of(tmp_path)))
    assert "speedup_own_base" not in names


def test_panels_of_one_model_show_their_differences(tmp_path):
    write_run(tmp_path, loader="native")
    write_run(tmp_path, loader="synthetic")
    assert [panel.lines[1] for panel in panels_of(tmp_path)] == ["native", "synthetic"]


def test_a_panel_names_its_device_once_where_there_are_several(tmp_path):
    write_run(tmp_path, per_gpu=16)
    write_run(tmp_path, per_gpu=32, device="cpu")
    assert sorted(panel.lines[1] for panel in panels_of(tmp_path)) == [CPU, GPU]


def test_by_loader_native_and_dali_are_curves_of_one_panel_a_framework(tmp_path):
    loaders = (("native", 100.0), ("dali", 160.0))
    for framework, (loader, rate), gpus in product(("ddp", "fsdp"), loaders, (1, 2)):
        write_run(tmp_path, framework=framework, loader=loader, gpus=gpus, rate=rate * gpus)
    measurements = tables_of(tmp_path, by="loader").measurements
    result = panels(measurements)
    assert [panel.lines[1] for panel in result] == ["ddp", "fsdp"]
    assert [[rows[0]["compared"] for rows in panel.curves.values()] for panel in result] == [["dali", "native"]] * 2
    assert {panel.base for panel in result} == {"base: dali on 1 GPU, 6.25 ms a sample"}
    assert {panel.against_own_bases().base for panel in result} == {"base: each loader's own fewest GPUs"}
    lines = [f"base dali@1, resnet50, {name}, 32 samples an update: 6.25 ms a sample" for name in ("ddp", "fsdp")]
    assert all(line in "\n".join(base_lines(measurements)) for line in lines)


def test_by_model_a_panel_has_all_models_and_names_the_changed_sizes_that_they_share(tmp_path):
    for model, layers in (("resnet50", [1, 1, 1, 1]), ("resnet101", [1, 1, 2, 1])):
        write_run(tmp_path, model=model, changed={"layers": layers, "image_size": 64})
    (panel,) = panels(tables_of(tmp_path, by="model").measurements)
    assert (panel.model, panel.lines[1]) == ("resnet101*, resnet50*", "image_size=64")
    assert len(panel.curves) == 2


def test_durations_have_three_digits_and_devices_their_number():
    seconds = (1234.5, 12.34, 2.0, 0.1, 0.00971, 0.000123)
    assert [duration(each) for each in seconds] == ["1,234 s", "12.3 s", "2.00 s", "100 ms", "9.71 ms", "123 µs"]
    assert [duration(time) for time in (0.9994, 0.9997, 0.0009997)] == ["999 ms", "1.00 s", "1.00 ms"]
    assert [devices(1, "cuda"), devices(4, "cuda"), devices(2, "cpu")] == ["1 GPU", "4 GPUs", "2 ranks"]
    assert devices(0, "cuda") == "an unknown number of GPUs"


def test_a_model_of_other_sizes_has_panels_of_its_own_that_say_so(tmp_path):
    write_run(tmp_path, rate=100.0)
    write_run(tmp_path, rate=900.0, changed={"layers": [1, 1, 1, 1], "image_size": 64})
    tables = tables_of(tmp_path)
    result = panels(tables.measurements)
    assert {panel.model: panel.lines[1] for panel in result} == {
        "resnet50": "",
        "resnet50*": "image_size=64 layers=[1,1,1,1]",
    }
    models = [panel.model for plot in plots_of(tables) for panel in plot.panels]
    assert set(models) == {"resnet50", "resnet50*"}
    assert models.count("resnet50*") == models.count("resnet50") > 4  # accuracy over epochs and time too
