"""CSV files of published measurements: every unit by hand, and what is left out."""

from __future__ import annotations

import pytest

from ddlbench.errors import UserError
from ddlbench.results.reading.published import read_points, record_of
from tests.support.published import cells, write_csv


def read(tmp_path, *rows):
    return read_points(write_csv(tmp_path / "points.csv", *rows))


def the_one(tmp_path, **changed):
    (point,), left_out = read(tmp_path, cells(**changed))
    assert left_out == []
    return point


TOKENS = {"unit": "tokens/s/GPU", "seq_len": 2000, "base_gpus": 4, "base_value": 1250, "measured": 1000, "step_ms": ""}
EPOCH = {"unit": "s/epoch (median)", "layout": "1000000 images an epoch", "measured": 50, "base_gpus": 4}


@pytest.mark.parametrize(
    ("changed", "seconds", "base_s"),
    [
        ({}, 1 / 760, 1 / 100),
        ({"unit": "seq/s"}, 1 / 760, 1 / 100),
        ({"unit": "img/s/GPU", "measured": 95}, 1 / (95 * 8), 1 / 100),
        (TOKENS, 2000 / (1000 * 8), 2000 / (1250 * 4)),  # 0.25 and 0.4 s a sample
        ({**EPOCH, "base_value": 80, "step_ms": 512 * 50 / 1e3}, 50e-6, 80e-6),
    ],
)
def test_seconds_a_sample_in_each_unit(tmp_path, changed, seconds, base_s):
    point = the_one(tmp_path, **changed)
    assert point["sample_time_s"] == pytest.approx(seconds, rel=1e-12)
    assert point["more"]["base_sample_time_s"] == pytest.approx(base_s, rel=1e-12)


def test_a_record_has_what_the_row_states(tmp_path):
    record = record_of(the_one(tmp_path, layout="mbs16 acc4", gpus_per_node=4))
    assert record["origin"] == "published"
    assert record["launch"] == {"world_size": 8, "nodes": 2, "ranks_per_node": 4, "device_type": "cuda"}
    assert record["ledger"] == {"global_batch": 512, "micro_batch": 16}
    assert record["summary"]["throughput_samples_per_s"] == pytest.approx(760)
    assert record["summary"]["throughput_samples_per_s_per_gpu"] == pytest.approx(95)
    stated = record["published"]
    assert (stated["source"], stated["base_gpus"], stated["base_sample_time_s"]) == ("Example 2020", 1, 0.01)
    assert "tokens_per_sample" not in record["model"], "what is not stated is not there"
    assert "quote" not in stated


def test_rows_of_one_base_are_a_series(tmp_path):
    (base, other, two), _ = read(
        tmp_path,
        cells(gpus=1, gpus_per_node=1, measured=100, batch_per_gpu=512, step_ms=""),
        cells(),
        cells(base_value=90, measured=700, step_ms=""),
    )
    assert base["series"] == other["series"] == "1 GPU at 100 img/s"
    assert two["series"] == "1 GPU at 90 img/s"


def test_rows_without_a_base_are_read(tmp_path):
    points, left_out = read(tmp_path, cells(), cells(model="VGG-16", base_gpus="", base_value=""))
    assert left_out == []
    assert [point["more"]["base_value"] for point in points] == ["100", None]
    assert ["base_gpus" in point["more"] for point in points] == [True, False]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"gpu_type": "XPU 9"}, "unknown GPU 'XPU 9'"),
        ({"gpu_type": ""}, "unknown GPU ''"),
        ({"unit": "img/min"}, "unknown unit 'img/min'"),
        ({"unit": "ms", "measured": 673.7}, "unknown unit 'ms', or its batch is not stated"),
        ({"step_ms": 84.21}, "mixed units: 760 img/s give 673.684 ms a step, step_ms is 84.21"),
        ({"gpus": 6, "gpus_per_node": 4}, "6 GPUs do not fill nodes of 4"),
        ({"gpus": "eight"}, "gpus = 'eight' is no number above 0"),
        ({"gpus": "1.5"}, "gpus = '1.5' is no whole number"),
        ({"measured": "nan"}, "measured = 'nan' is no number above 0"),
        ({"measured": "-3"}, "measured = '-3' is no number above 0"),
        ({"base_value": "1e-320"}, "base_value = '1e-320' is no number above 0"),
        ({"base_value": ""}, "base_value = '' is no number above 0"),
        ({"global_batch": 500, "step_ms": ""}, "8 GPUs with 64 samples each are not global_batch = 500"),
        ({"unit": "tokens/s/GPU"}, "seq_len = '' is no number above 0"),
        ({"unit": "s/epoch"}, "its layout does not state the images of an epoch"),
        ({**EPOCH, "layout": "0 images an epoch"}, "its layout does not state the images of an epoch"),
        ({"url": ""}, "url is empty"),
        ({"model": "\x1b[31m", "gpu_type": "\x1b]0;x\x07"}, r"unknown GPU '\\x1b]0;x\\x07'"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_left_out(tmp_path, changed, reason):
    points, left_out = read(tmp_path, cells(**changed), cells(model="VGG-16"))
    assert [point["line"] for point in points] == [3]
    (line,) = left_out
    assert line.startswith(f"row 2: {reason}")
    assert line.isprintable()


def test_units_that_are_mixed_within_a_source_and_model_are_named(tmp_path):
    points, (line,) = read(tmp_path, cells(), cells(unit="seq/s", gpus_per_node=4), cells(model="VGG-16"))
    assert [point["line"] for point in points] == [4]
    assert line == "row 2, 3: Example 2020, ResNet-50: mixed units (img/s, seq/s)"


def test_a_row_with_other_cells_than_the_header_is_named_by_its_line_in_the_file(tmp_path):
    path = write_csv(tmp_path / "points.csv", cells(), cells(model="VGG-16"))
    head, first, second = path.read_text().splitlines()
    path.write_text("\n".join([head, f"{first},more", "", second.rpartition(",")[0]]))
    left_out = ["row 2: it has more cells than the header", "row 4: it has fewer cells than the header"]
    assert read_points(path) == ([], left_out)


@pytest.mark.parametrize("change", [lambda row: row.pop("unit"), lambda row: row.update(speed=3)])
def test_other_columns_are_refused_with_their_names(tmp_path, change):
    row = cells()
    change(row)
    with pytest.raises(UserError, match=r"other columns \(missing or unknown: (unit|speed)\)"):
        read(tmp_path, row)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'"a\n', b"a,b\x00\n"])
def test_a_file_that_is_no_csv_or_missing_is_refused(tmp_path, content):
    with pytest.raises(UserError, match="No such file"):
        read_points(tmp_path / "points.csv")
    (tmp_path / "points.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read|other columns"):
        read_points(tmp_path / "points.csv")
