"""Columns beside the throughput: bubble, staleness, HFU, steady rate and marks, from records made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddlbench.results.tables.tables import records
from tests.support.records import tables_of, write_run

STAGED = {"bubble": 0.3, "bubble_theoretical": 3 / 11, "staleness": [2, 1, 0], "staleness_theoretical": [3, 1, 0]}
COLUMNS = ("bubble", "bubble_theoretical", "staleness_max", "staleness_theoretical_max")
COSTLY = {"name": "resnet50", "changed": {}, "flops_per_sample": 2e9, "hardware_flops_per_sample": 2.5e9}


def test_bubble_and_staleness_are_what_the_framework_says(tmp_path: Path) -> None:
    write_run(tmp_path, framework="pipedream", sections={"framework": STAGED})
    write_run(tmp_path, framework="ddp", sections={"framework": {"staleness": 0}})
    write_run(tmp_path, framework="fsdp")
    made = tables_of(tmp_path)
    rows = {row["framework"]: row for row in records(made.runs)}
    result = {name: [row[column] for column in COLUMNS] for name, row in rows.items()}
    assert result == {"pipedream": [0.3, 3 / 11, 2, 3], "ddp": [None, None, 0, None], "fsdp": [None] * 4}
    merged = {row["framework"]: row for row in records(made.scaling)}
    assert [merged["pipedream"][column] for column in COLUMNS] == [0.3, 3 / 11, 2, 3]


@pytest.mark.parametrize("staleness", ["two", [None], {"a": 1}, [-1], True])
def test_a_staleness_that_is_no_number_is_empty(tmp_path: Path, staleness: Any) -> None:
    write_run(tmp_path, sections={"framework": {"staleness": staleness}})
    (row,) = records(tables_of(tmp_path).runs)
    assert row["staleness_max"] is None


def test_merged_rates_come_from_merged_seconds(tmp_path: Path) -> None:
    for repeat, (rate, steady) in enumerate(((100.0, 110.0), (50.0, 80.0), (90.0, 20.0), (80.0, 100.0))):
        summary = {"throughput_steady_samples_per_s": steady, "energy_sample_j": 2.0 + repeat, "hfu": 0.0025 * rate}
        write_run(tmp_path, rate=rate, repeat=repeat, summary=summary, sections={"model": COSTLY})
    (row,) = records(tables_of(tmp_path).scaling)
    assert row["throughput_steady_samples_per_s"] == pytest.approx(1 / ((1 / 100 + 1 / 80) / 2))
    assert row["throughput_samples_per_s"] == pytest.approx(1 / ((1 / 90 + 1 / 80) / 2))
    assert row["hfu"] == pytest.approx(row["mfu"] * 2.5 / 2)
    assert row["energy_sample_j"] == 3.5


def test_records_of_an_earlier_version_have_empty_cells(tmp_path: Path) -> None:
    write_run(tmp_path)
    made = tables_of(tmp_path)
    (run,), (row,) = records(made.runs), records(made.scaling)
    for name in ("throughput_steady_samples_per_s", "energy_epoch_j", "hfu", "bubble", "own_step_s", "marks"):
        assert (run[name], row[name]) == (None, None), name
    assert (run["straggler_host"], row["energy_source"]) == (None, None)
    assert made.warnings == []
