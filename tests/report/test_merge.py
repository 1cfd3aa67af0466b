"""Which attempts are repeats of one measurement."""

from __future__ import annotations

import pytest

from ddlbench.report.merge import AttemptRow, measured_options, measurements
from ddlbench.report.read import read_all
from ddlbench.report.tables import make_tables, run_row
from tests.support import records


def groups(results):
    """(status, repeat) of the attempts, group by group."""
    attempts = read_all([results]).attempts
    runs = [AttemptRow(run_row(attempt, []), measured_options(attempt.record["config"])) for attempt in attempts]
    return sorted(sorted((run.row["status"], run.row["repeat"]) for run in group) for group in measurements(runs))


def test_options_are_what_is_measured():
    config = {"results_dir": "r", "train": {"seed": 1, "timeout_s": 9.0}, "model": {"_target_": "a.B", "name": "m"}}
    assert measured_options(config) == {"train.seed": 1, "model.name": "m"}


def test_repeats_are_merged_and_several_tries_count(tmp_path):
    records.write_run(tmp_path, repeat=0)
    records.write_run(tmp_path, repeat=0, attempt=2)
    records.write_run(tmp_path, repeat=1)
    assert groups(tmp_path) == [[("ok", 0), ("ok", 0), ("ok", 1)]]


def test_a_batch_is_the_same_however_it_was_asked_for(tmp_path):
    records.write_run(tmp_path, gpus=2, per_gpu=32, repeat=0)
    records.write_run(tmp_path, gpus=2, per_gpu=None, global_batch=64, repeat=1)
    assert groups(tmp_path) == [[("ok", 0), ("ok", 1)]]


@pytest.mark.parametrize(
    "other",
    [
        {"dataset": "b" * 64},
        {"gpus": 2},
        {"per_gpu": 16},
        {"train": {"precision": "bf16"}},
        {"train": {"steps": 5}},
        {"train": {"seed": 1}},
        {"knobs": {"bucket_cap_mb": 50}},
        {"loader": "dali"},
        {"device": "cpu"},
        {"sections": {"environment": {"gpu_model": "Another GPU", "torch": "2.14.1", "cuda": "13.0"}}},
        {"sections": {"environment": {"gpu_model": records.GPU, "torch": "2.13.0", "cuda": "13.0"}}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_differs_is_not_merged(tmp_path, other):
    records.write_run(tmp_path, repeat=0)
    records.write_run(tmp_path, **{"repeat": 1} | other)
    assert len(groups(tmp_path)) == 2


def test_a_failure_joins_the_one_group_it_fits(tmp_path):
    records.write_run(tmp_path, repeat=0)
    records.write_run(tmp_path, repeat=1, status="error", dataset=None)  # failed before the data set was known
    assert groups(tmp_path) == [[("error", 1), ("ok", 0)]]


def test_a_failure_that_fits_two_groups_stands_alone(tmp_path):
    records.write_run(tmp_path, repeat=0)
    records.write_run(tmp_path, repeat=0, dataset="b" * 64)
    records.write_run(tmp_path, repeat=1, status="error", dataset=None)
    assert groups(tmp_path) == [[("error", 1)], [("ok", 0)], [("ok", 0)]]


def test_a_failure_of_another_data_set_stands_alone(tmp_path):
    records.write_run(tmp_path, repeat=0)
    records.write_run(tmp_path, repeat=1, status="oom", dataset="b" * 64)
    assert groups(tmp_path) == [[("ok", 0)], [("oom", 1)]]


def test_failures_alone_are_one_measurement(tmp_path):
    records.write_run(tmp_path, status="oom", attempt=1)
    records.write_run(tmp_path, status="error", attempt=2, dataset=None)
    assert groups(tmp_path) == [[("error", 0), ("oom", 0)]]


def test_both_tables_name_the_measurement_alike(tmp_path):
    records.write_run(tmp_path, repeat=0)
    records.write_run(tmp_path, repeat=1, status="oom")
    tables = make_tables(read_all([tmp_path]))
    assert list(tables.runs["measurement"].unique()) == list(tables.scaling["measurement"])
