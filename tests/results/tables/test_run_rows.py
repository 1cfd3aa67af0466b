"""A summary is used only where it is the one of its own epochs; a Parquet file that cannot be read is named, and all
runs are reported as they would be without."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddlbench.measure.formulas.summary_formulas import ALL, LAST, MEASURED
from ddlbench.measure.rows import EpochRow
from ddlbench.measure.summary import summarize
from ddlbench.record.record import EpochFiles
from ddlbench.record.schema import RUNS
from ddlbench.results.reading.cells import epochs_of
from ddlbench.results.tables.run_rows import PARQUET, contradiction, damaged_parquet
from ddlbench.results.tables.tables import records
from tests.support.epoch_rows import epoch_row
from tests.support.records import edit_epochs, edited, tables_of, write_repeats, write_run

SHARES = ("val_loss", "val_top1", "val_top5")
COUNTS = ("val_perplexity_token", "val_perplexity_word", "val_samples")
GPUS, TOKENS, FLOPS, COMPUTED, PEAK = 2, 1024, 3e9, 4e9, 1e12


def epochs() -> list[EpochRow]:
    """A warm-up epoch and three others; no two have a value in common, and none rises or falls with their number."""
    times = ([9.0, 1.5, 1.0], [1.0, 2.0, 4.0], [1.25, 3.0, 8.0], [1.75, 2.5, 1.125])
    rows = [epoch_row(n, 4, list(seconds), warmup=int(n == 0)) for n, seconds in enumerate(times)]
    for n, row in enumerate(rows):
        odd = (7, 3, 11, 5)[n]
        row.metrics = dict.fromkeys(SHARES, odd / 100) | dict.fromkeys(COUNTS, odd)
        row.metrics |= {"validation_time_s": odd / 2, "read_bytes": 1000 * odd}
        row.memory = dict.fromkeys(row.memory, odd * 2**20)
        row.straggler_wait_s, row.data_wait_share, row.host_wait_share = odd / 64, odd / 32, odd / 128
        row.train_loss = odd / 4
        row.energy_j, row.energy_time_s, row.cpu_time_s, row.sent_bytes = 100.0 * odd, odd + 1.0, odd / 3, odd * 64
    return rows


def summary(rows: list[EpochRow]) -> dict[str, Any]:
    """The columns of runs.csv."""
    made = summarize(rows, GPUS, TOKENS)
    rate = made["throughput_samples_per_s_per_gpu"]
    used = {"model_flops_per_s_per_gpu": rate * FLOPS, "mfu": rate * FLOPS / PEAK, "hfu": rate * COMPUTED / PEAK}
    model = {"tokens_per_sample": TOKENS, "flops_per_sample": FLOPS, "hardware_flops_per_sample": COMPUTED}
    return dict.fromkeys(column.name for column in RUNS) | made | used | model | {"gpus": GPUS}


def table(rows: list[EpochRow], earlier: int = 0) -> pa.Table:
    """earlier: so many of the epochs were measured by an attempt that this one continued"""
    lines = [row.line() | ({"measured_in_attempt": 1} if n < earlier else {}) for n, row in enumerate(rows)]
    result = epochs_of(lines, notes := [])
    assert notes == []
    return result


def test_what_a_run_writes_agrees_with_itself() -> None:
    rows = epochs()
    assert contradiction(summary(rows), table(rows)) is None
    assert contradiction(summary(rows[:1]), table(rows[:1])) is None  # a single epoch is measured, warm-up or not


@pytest.mark.parametrize("column", [*MEASURED, *ALL, *LAST])
@pytest.mark.parametrize("factor", [0.99, 1.01, 1e9])
def test_each_column_is_compared(column: str, factor: float) -> None:
    rows = epochs()
    given = summary(rows)
    assert given[column], "the example has a value"
    wrong = given | {column: given[column] * factor}
    assert str(contradiction(wrong, table(rows))).startswith(f"{column} = ")
    assert contradiction(given | {column: None}, table(rows)) is None


def test_mfu_is_compared_with_hfu() -> None:
    """A record lacks the peak that mfu is a share of."""
    rows = epochs()
    given = summary(rows)
    wrong = given | {"mfu": given["mfu"] * 1.01}
    assert str(contradiction(wrong, table(rows))).startswith("hfu = ")
    assert contradiction(wrong | {"hfu": given["hfu"] * 1.01}, table(rows)) is None


def test_no_time_gives_no_power_and_no_traceback() -> None:
    rows = epochs()
    given = summary(rows)
    for row in rows:
        row.energy_time_s = 0.0
    assert str(contradiction(given, table(rows))).startswith("power_mean_w = ")


def test_epochs_of_an_earlier_attempt_count_among_those_done_alone() -> None:
    rows = epochs()
    resumed = summary(rows[2:]) | {"epochs_done": 4}
    assert contradiction(resumed, table(rows, earlier=2)) is None
    assert contradiction(resumed | {"epochs_done": 2}, table(rows, earlier=2)) == "epochs_done = 2, epochs.jsonl has 4"
    assert contradiction(summary(rows), table(rows, earlier=2)) == "epochs_measured = 3, its epochs give 2"


def test_an_epoch_without_a_time_is_no_epoch_of_the_median() -> None:
    rows = epochs()
    rows[2].epoch_time_s = 0.0
    given = summary(rows)
    result = epochs_of([row.line() for row in rows], notes := [])
    assert len(notes) == 1
    assert str(contradiction(given, result)).startswith("epoch_time_s = ")


def test_older_records_lack_columns() -> None:
    rows = epochs()
    thin = table(rows).select([]).append_column("epoch", pa.array([0, 1, 2, 3]))
    empty = {field.name: pa.nulls(4, field.type) for field in table(rows).schema}
    assert contradiction(summary(rows), pa.table(empty | {"epoch": thin["epoch"]})) is None
    assert contradiction(summary(rows) | {"epochs_done": None}, table([]).slice(0)) is None


def speedups(results: Path) -> list[float | None]:
    return [row["speedup"] for row in records(tables_of(results).scaling)]


@pytest.mark.parametrize("lines", ["whole", "one broken", "empty", "missing"])
def test_a_rate_that_nothing_confirms_moves_no_speedup(tmp_path: Path, lines: str) -> None:
    for framework in ("single", "ddp"):
        write_run(tmp_path, framework=framework)
    alone = speedups(tmp_path)
    folder = write_run(tmp_path, framework="ddp", repeat=1, summary={"throughput_samples_per_s": 1e9})
    file = folder / "epochs.jsonl"
    edit_epochs(folder, *[{"measured_samples": 1024, "measured_time_s": 10.24}] * 3)
    whole = file.read_text()
    file.write_text({"one broken": whole.split("\n", 1)[1] + "{", "empty": ""}.get(lines, whole))
    if lines == "missing":
        file.unlink()
    assert speedups(tmp_path) == alone
    said = f"{folder}: the summary is left out: "
    assert any(text.startswith(said) for text in tables_of(tmp_path).warnings)


@pytest.mark.parametrize("said", [0, 5e-324, -0.0, 1e-9])
def test_an_epoch_of_no_time_moves_no_median(tmp_path: Path, said: float) -> None:
    """With two others the median would be the smaller one of them."""
    write_repeats(tmp_path, 100.0, 80.0)
    (alone,) = records(tables_of(tmp_path).scaling)
    write_run(tmp_path, repeat=2, summary={"epoch_time_s": said})
    tables = tables_of(tmp_path)
    (row,) = records(tables.scaling)
    assert row["epoch_time_s"] == alone["epoch_time_s"]
    assert any("epoch_time_s = " in text and "must lie in 1e-06 to 1e+09" in text for text in tables.warnings)


def test_a_summary_of_other_epochs_is_left_out_and_the_attempt_stays_a_row(tmp_path: Path) -> None:
    for framework in ("single", "ddp"):
        write_run(tmp_path, framework=framework)
    alone = speedups(tmp_path)
    folder = write_run(tmp_path, repeat=1)
    with edited(folder) as record:
        record["summary"] |= {"val_top1": 0.99, "throughput_samples_per_s": 1e9}
    assert speedups(tmp_path) == alone
    tables = tables_of(tmp_path)
    said = f"{folder}: the summary is left out: val_top1 = 0.99, its epochs give "
    assert any(text.startswith(said) for text in tables.warnings)
    (row,) = [row for row in records(tables.runs) if row["path"] == str(folder)]
    assert (row["status"], row["throughput_samples_per_s"], row["val_top1"]) == ("ok", None, None)
    assert "1 ended ok without a rate" in str(tables.left_out)


TABLE = pa.table({"epoch": [0, 0], "step": [0, 1]})


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def shortened(path: Path) -> None:
    """The footer's length says more than there is."""
    path.write_bytes(b"PAR1" + path.read_bytes()[-8:])


MAGIC = "Parquet magic bytes not found in footer"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, MAGIC),
    "shortened": (shortened, "smaller than the size reported by footer"),
    "footer": (lambda path: path.write_bytes(b"PAR1" + b"\x7f" * 999 + path.read_bytes()[-8:]), "Couldn't deserialize"),
    "foreign": (lambda path: path.write_bytes(os.urandom(999)), MAGIC),
    "text": (lambda path: path.write_text("epoch,step\n"), MAGIC),
    "empty": (lambda path: path.write_bytes(b""), "Parquet file size is 0 bytes"),
    "few bytes": (lambda path: path.write_bytes(b"PAR1"), "Parquet file size is 4 bytes"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is not a regular file"),
    "link": (lambda path: (path.unlink(), path.symlink_to("nowhere")), "No such file or directory"),
}


def test_damaged_files_are_named_and_all_runs_are_reported(tmp_path: Path) -> None:
    cases = list(product(PARQUET, DAMAGES))
    folders = [write_run(tmp_path, repeat=repeat) for repeat in range(len(cases))]
    for folder, name in product(folders, PARQUET):
        pq.write_table(TABLE, folder / name)
    before = tables_of(tmp_path)
    assert before.warnings == []
    for folder, (name, kind) in zip(folders, cases, strict=True):
        DAMAGES[kind][0](folder / name)
        if kind != "pipe":  # reading it would wait
            with pytest.raises((OSError, ValueError)):
                pd.read_parquet(folder / name)
    after = tables_of(tmp_path)
    for folder, (name, kind) in zip(folders, cases, strict=True):
        (warning,) = [text for text in after.warnings if text.startswith(str(folder))]
        assert warning.startswith(f"{folder / name} cannot be read (")
        assert DAMAGES[kind][1] in warning
    assert len(after.warnings) == len(cases)
    for table in ("runs", "epochs", "scaling"):
        pd.testing.assert_frame_equal(getattr(after, table), getattr(before, table))
    assert after.scaling["runs_ok"].tolist() == [len(cases)]


def test_of_a_run_that_was_killed_the_damaged_epoch_is_named_and_the_others_stay(tmp_path: Path) -> None:
    """Its steps.parquet is still a folder. At the end of a run such a folder is kept as it is."""
    files = EpochFiles(tmp_path / "steps.parquet", TABLE.schema)
    for epoch in range(3):
        files.append(epoch, [TABLE])
    assert damaged_parquet(tmp_path) == []
    second = tmp_path / "steps.parquet" / "epoch-000001.parquet"
    truncated(second)
    (warning,) = damaged_parquet(tmp_path)
    assert warning.startswith(f"{second} cannot be read ({MAGIC}")
    with pytest.raises(OSError, match=r"epoch-000001.parquet is damaged"):
        files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.parquet"]
    second.unlink()
    files.close()
    assert pq.read_table(tmp_path / "steps.parquet").num_rows == 4


def test_an_attempt_without_these_files_has_nothing_to_warn_of(tmp_path: Path) -> None:
    assert damaged_parquet(write_run(tmp_path)) == []
    assert damaged_parquet(tmp_path / "nowhere") == []
