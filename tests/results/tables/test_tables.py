"""runs.csv and epochs.csv: known values are in their cells, unknown values are empty cells."""

from __future__ import annotations

import pandas as pd
import pytest

from ddlbench.record.schema import DEVELOPER, EPOCHS, RUNS, SCALING
from ddlbench.results.tables.tables import records
from tests.support.records import CPU, GIB, GPU, strong_scaling, tables_of, weak_scaling, write_run


def only(table):
    (row,) = records(table)
    return row


def test_columns_are_the_dictionary(tmp_path):
    write_run(tmp_path)
    tables = tables_of(tmp_path)
    assert list(tables.runs) == [column.name for column in RUNS]
    assert list(tables.epochs) == [column.name for column in EPOCHS]
    assert list(tables.scaling) == [column.name for column in SCALING]


def test_ranks_that_shared_a_gpu_are_rows_but_no_measurement(tmp_path):
    write_run(tmp_path, gpus=1)
    shared = write_run(tmp_path, gpus=2, sections={"launch": {"world_size": 2, "backend": DEVELOPER}})
    tables = tables_of(tmp_path)
    assert len(tables.runs) == 2
    assert only(tables.scaling)["gpus"] == 1
    assert tables.warnings == [f"{shared}: ranks shared a GPU: not in the scaling table"]


def test_a_run_is_a_row(tmp_path):
    write_run(tmp_path, gpus=4, rate=256.0, repeat=3)
    row = only(tables_of(tmp_path).runs)
    assert (row["framework"], row["model"], row["loader"], row["gpus"]) == ("ddp", "resnet50", "native", 4)
    assert (row["status"], row["reason"], row["attempt"], row["repeat"]) == ("ok", None, 1, 3)
    assert (row["global_batch"], row["batch_per_gpu"]) == (128, 32.0)
    assert row["epoch_time_s"] == 4.0
    assert row["throughput_samples_per_s_per_gpu"] == 64.0
    assert row["memory_allocated_peak_bytes"] == 3 * GIB + GIB // 2
    assert (row["device"], row["device_model"]) == ("cuda", GPU)
    assert row["framework_facts"] == '{"bucket_cap_mb": 25}'
    assert row["git_dirty"] is False


def test_the_micro_batch_is_the_share_of_a_replica_where_none_was_asked_for(tmp_path):
    write_run(tmp_path, sections={"ledger": {"replica_batch": 32, "micro_batches": 4, "micro_batch": None}})
    assert only(tables_of(tmp_path).runs)["micro_batch"] == 8


def test_on_cpu_the_device_is_the_cpu(tmp_path):
    write_run(tmp_path, device="cpu")
    row = only(tables_of(tmp_path).runs)
    assert (row["device"], row["device_model"]) == ("cpu", CPU)
    assert row["memory_allocated_peak_bytes"] is None
    assert row["mfu"] is None


def test_a_failed_attempt_is_a_row_with_what_it_reached(tmp_path):
    write_run(tmp_path, gpus=2, status="oom", reason="CUDA out of memory")
    tables = tables_of(tmp_path)
    row = only(tables.runs)
    assert (row["status"], row["reason"]) == ("oom", "CUDA out of memory")
    assert row["global_batch"] == 64, "known from what was asked: 32 a GPU on 2"
    assert row["epoch_time_s"] is None
    assert tables.epochs.empty


def test_records_that_cannot_be_used_are_rows_and_warnings(tmp_path):
    write_run(tmp_path, gpus=1)
    write_run(tmp_path, gpus=2, sections={"schema_version": 0})
    broken = write_run(tmp_path, gpus=4)
    (broken / "run.json").write_text((broken / "run.json").read_text()[:200])
    write_run(tmp_path, gpus=8, status="running")
    tables = tables_of(tmp_path)
    assert sorted(tables.runs["status"]) == ["ok", "running", "unreadable", "unreadable"]
    assert tables.runs.loc[tables.runs["status"] != "ok", "reason"].notna().all()
    assert len(tables.warnings) == 2
    assert sorted(tables.scaling["status"]) == ["ok", "running"], (
        "an unreadable record has no configuration to stand for"
    )


@pytest.mark.parametrize("config", [None, {}, "text", {"train": None, "framework": "ddp"}])
def test_odd_sections_do_not_crash(tmp_path, config):
    sections = {"config": config, "summary": [], "launch": None, "environment": 3, "ledger": "x"}
    write_run(tmp_path, sections=sections)
    row = only(tables_of(tmp_path).runs)
    assert row["status"] == "ok"
    assert row["gpus"] is None
    assert row["throughput_samples_per_s"] is None


@pytest.mark.parametrize("batch", [2**62, -1])
def test_an_impossible_batch_is_left_out(tmp_path, batch):
    folder = write_run(tmp_path, gpus=8, per_gpu=batch, status="error", reason="boom")
    tables = tables_of(tmp_path)
    assert only(tables.runs)["global_batch"] is None
    assert tables.warnings[0].startswith(f"{folder}: left out of the tables: global_batch = {8 * batch} (")


def test_a_warning_names_the_first_values_that_are_left_out(tmp_path):
    names = ("epoch_time_s", "epoch_time_min_s", "epoch_time_max_s", "validation_time_s", "data_wait_share")
    write_run(tmp_path, summary=dict.fromkeys(names, -1.0))
    (warning,) = tables_of(tmp_path).warnings
    assert warning.count(" = -1.0 (must lie in ") == 3
    assert warning.endswith("), and 8 more"), "with those of the epochs"


def test_unknown_is_an_empty_cell_never_zero(tmp_path):
    write_run(tmp_path / "results", device="cpu", summary={"tokens_per_s": None, "allocator_retries": 0})
    tables_of(tmp_path / "results").write(tmp_path)
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    row = dict(zip(lines[0].split(","), lines[1].split(","), strict=False))
    assert (row["tokens_per_s"], row["mfu"], row["steps_cap"], row["reason"]) == ("", "", "", "")
    back = pd.read_csv(tmp_path / "runs.csv").iloc[0]
    assert back["allocator_retries"] == 0, "a known 0 stays 0"
    assert back["gpus"] == 1


def test_epochs_are_tidy(tmp_path):
    weak_scaling(tmp_path)
    strong_scaling(tmp_path)
    epochs = tables_of(tmp_path).epochs
    assert len(epochs) == 3 * (4 + 3)
    images, text = epochs[epochs["model"] == "resnet50"], epochs[epochs["model"] == "gpt2_small"]
    assert images["val_top1"].notna().all()
    assert images["val_perplexity_token"].isna().all()
    assert text["val_top1"].isna().all()
    assert list(text["val_perplexity_token"].astype(float).unique()) == [400.0, 200.0, 400.0 / 3]
    assert epochs.groupby("path")["warmup"].sum().eq(1).all(), "epoch 0 of each run"
    assert set(epochs["gpus"]) == {1, 2, 4, 8}
