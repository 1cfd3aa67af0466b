"""runs.csv and epochs.csv: known values are in their cells, unknown values are empty cells; the files; --only."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pandas as pd
import pytest

from ddlbench.errors import UserError
from ddlbench.record.schema import DEVELOPER, EPOCHS, RUNS, SCALING
from ddlbench.report.__main__ import main
from ddlbench.results.tables.tables import only, records, write_csv
from tests.support.figures import figures_of
from tests.support.records import CPU, GIB, GPU, strong_scaling, tables_of, weak_scaling, write_run


def single_row(table):
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
    assert single_row(tables.scaling)["gpus"] == 1
    assert tables.warnings == [f"{shared}: ranks shared a GPU: not in the scaling table"]


def test_a_run_is_a_row(tmp_path):
    write_run(tmp_path, gpus=4, rate=256.0, repeat=3)
    row = single_row(tables_of(tmp_path).runs)
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
    assert single_row(tables_of(tmp_path).runs)["micro_batch"] == 8


def test_bubble_and_staleness_are_what_the_framework_says(tmp_path):
    staged = {"bubble": 0.3, "bubble_theoretical": 0.2, "staleness": [2, 1, 0], "staleness_theoretical": [3, 1, 0]}
    write_run(tmp_path, framework="pipedream", sections={"framework": staged})
    write_run(tmp_path, framework="ddp", sections={"framework": {"staleness": 0}})
    write_run(tmp_path, framework="fsdp")
    tables = tables_of(tmp_path)
    columns = ("bubble", "bubble_theoretical", "staleness_max", "staleness_theoretical_max")
    for table in (tables.runs, tables.scaling):
        result = {row["framework"]: [row[column] for column in columns] for row in records(table)}
        assert result == {"pipedream": [0.3, 0.2, 2, 3], "ddp": [None, None, 0, None], "fsdp": [None] * 4}


@pytest.mark.parametrize("staleness", ["two", [None], {"a": 1}, [-1], True])
def test_a_staleness_that_is_no_number_is_empty(tmp_path, staleness):
    write_run(tmp_path, sections={"framework": {"staleness": staleness}})
    assert single_row(tables_of(tmp_path).runs)["staleness_max"] is None


def test_on_cpu_the_device_is_the_cpu(tmp_path):
    write_run(tmp_path, device="cpu")
    row = single_row(tables_of(tmp_path).runs)
    assert (row["device"], row["device_model"]) == ("cpu", CPU)
    assert row["memory_allocated_peak_bytes"] is None
    assert row["mfu"] is None


def test_a_failed_attempt_is_a_row_with_what_it_reached(tmp_path):
    write_run(tmp_path, gpus=2, status="oom", reason="CUDA out of memory")
    tables = tables_of(tmp_path)
    row = single_row(tables.runs)
    assert (row["status"], row["reason"]) == ("oom", "CUDA out of memory")
    assert row["global_batch"] == 64, "known from what was asked: 32 a GPU on 2"
    assert row["epoch_time_s"] is None
    assert tables.epochs.empty


@pytest.mark.parametrize("batch", [2**62, -1])
def test_an_impossible_batch_is_left_out(tmp_path, batch):
    folder = write_run(tmp_path, gpus=8, per_gpu=batch, status="error", reason="boom")
    tables = tables_of(tmp_path)
    assert single_row(tables.runs)["global_batch"] is None
    assert tables.warnings[0].startswith(f"{folder}: left out of the tables: global_batch = {8 * batch} (")


def test_a_warning_names_the_first_values_that_are_left_out(tmp_path):
    names = ("epoch_time_s", "epoch_time_min_s", "epoch_time_max_s", "validation_time_s", "data_wait_share")
    write_run(tmp_path, summary=dict.fromkeys(names, -1.0))
    (warning,) = tables_of(tmp_path).warnings
    assert warning.count(" = -1.0 (must lie in ") == 3
    assert warning.endswith("), and 8 more"), "with those of the epochs"


def test_records_of_an_earlier_version_have_empty_cells(tmp_path):
    write_run(tmp_path)
    made = tables_of(tmp_path)
    (run,), (row,) = records(made.runs), records(made.scaling)
    for name in ("throughput_steady_samples_per_s", "energy_epoch_j", "hfu", "bubble", "own_step_s", "marks"):
        assert (run[name], row[name]) == (None, None), name
    assert (run["straggler_host"], row["energy_source"]) == (None, None)
    assert made.warnings == []


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


def test_a_text_that_a_spreadsheet_would_run_is_quoted_in_every_row_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, framework="=1+1")
    write_run(tmp_path, framework="ddp")
    tables_of(tmp_path).write(tmp_path / "tables")
    table = pd.read_csv(tmp_path / "tables" / "epochs.csv")
    assert sorted(table["framework"]) == ["'=1+1"] * 3 + ["ddp"] * 3
    assert table["data"].eq("sample_images").all()


def test_a_cell_of_every_kind_is_written(tmp_path: Path) -> None:
    columns = {
        "text": pd.array(["plain", "a,b", 'say "so"', None, "two\nlines", "-1"], dtype="string"),
        "int": pd.array([0, -1, None, 2**63 - 1, -(2**63), 7], dtype="Int64"),
        "float": pd.array([3.0, -0.0, None, 1e-5, 123456789.125, 1e22], dtype="Float64"),
        "bool": pd.array([True, None, False, True, None, None], dtype="boolean"),
        "nothing": pd.array([None] * 6, dtype="string"),
    }
    write_csv(pd.DataFrame(columns), tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == (
        "text,int,float,bool,nothing\n"
        "plain,0,3.0,True,\n"
        '"a,b",-1,-0.0,,\n'
        '"say ""so""",,,False,\n'
        ",9223372036854775807,1e-05,True,\n"
        '"two\nlines",-9223372036854775808,123456789.125,,\n'
        "'-1,7,1e+22,,\n"
    )


def test_floats_of_any_bits_keep_all_their_digits(tmp_path: Path) -> None:
    drawn = random.Random(1)
    bits = [struct.unpack("d", struct.pack("Q", drawn.getrandbits(64)))[0] for _ in range(20_000)]
    values = [value for value in bits if math.isfinite(value)]
    write_csv(pd.DataFrame({"value": pd.array(values, dtype="Float64")}), tmp_path / "table.csv")
    assert list(map(float, (tmp_path / "table.csv").read_text().split()[1:])) == values


@pytest.fixture
def tables(tmp_path):
    weak_scaling(tmp_path)
    strong_scaling(tmp_path)
    return tables_of(tmp_path)


def test_the_rows_of_all_tables_and_their_bases(tables):
    part = only(tables, ["framework=ddp", "model=resnet50", "gpus=2,4"])
    assert list(part.runs["gpus"]) == [2, 4]
    assert list(part.scaling["gpus"]) == [2, 4]
    assert set(part.epochs["path"]) == set(part.runs["path"])
    assert set(part.scaling["best_single_framework"]) == {"single"}, "though it is not reported itself"
    assert part.warnings == ["only framework=ddp model=resnet50 gpus=2,4: 2 of 8 attempts are reported"]


def test_no_filter_changes_nothing(tables):
    assert only(tables, []) is tables


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["framework"], "COLUMN=VALUE"),
        (["color=red"], "COLUMN=VALUE"),
        (["framework=dpp"], "no attempt has it; the results have ddp, single"),
        (["framework=single", "gpus=4"], "leave one filter out"),
    ],
)
def test_a_filter_that_cannot_be_applied_is_refused(tables, filters, message):
    with pytest.raises(UserError, match=message):
        only(tables, filters)


def test_a_filter_that_takes_a_part_of_the_repeats_says_so(tmp_path):
    for repeat in range(3):
        write_run(tmp_path, repeat=repeat)
        write_run(tmp_path, repeat=repeat, train={"seed": 1})
    tables = tables_of(tmp_path)
    merged = "is not reported: the rows and figures of these are of all their attempts"
    part = only(tables, ["repeat=0,1"])
    assert part.warnings[1] == f"a part of the attempts of 2 measurements and 1 learning curves {merged}"
    assert only(tables, ["seed=1"]).warnings[1] == f"a part of the attempts of 1 learning curves {merged}"
    assert len(only(tables, ["gpus=1"]).warnings) == 1


def test_rows_and_figures_of_a_part_of_the_repeats_are_of_all(tmp_path, capsys):
    for gpus in (1, 2):
        for repeat, status in enumerate(("ok", "ok", "ok", "oom")):
            write_run(tmp_path / "results", gpus=gpus, repeat=repeat, status=status)
    part = only(tables_of(tmp_path / "results"), ["status=oom"])
    assert [len(row.runs) for row in part.measurements] == [3, 3]
    (axes,) = figures_of(part, "accuracy_by_batch")["accuracy_by_batch"].axes
    assert [len(line.get_xydata().tolist()) for line in axes.lines] == [2, 6, 0], "two medians, six repeats, the legend"
    filters = ["--only", "gpus=2", "repeat=0", "--target", "val_top1=0.5"]
    assert main([str(tmp_path / "results"), "--out", str(tmp_path), *filters]) == 0
    assert "warning: only gpus=2 repeat=0: 1 of 8 attempts are reported" in capsys.readouterr().err
    assert pd.read_csv(tmp_path / "tables" / "targets.csv")[["gpus", "runs"]].to_numpy().tolist() == [[2, 3]]
