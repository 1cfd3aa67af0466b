"""Published measurements in the tables: rows beside own ones, never their repeats, bases or rivals."""

from __future__ import annotations

import json
import shutil
from itertools import product

import pytest

from ddlbench.results.reading.mlperf import read_results
from ddlbench.results.reading.published import record_of
from tests.support import records
from tests.support.published import URL, cells, csv_facts, events, store, write_results
from tests.support.records import tables_of

# Two systems, 4 and 8 GPUs, each with its batch per GPU; the smaller one takes 180 s an epoch.
SLOW = (190_000, 180_000, 180_000, 180_000)


def scaling(*folders):
    return tables_of(*folders).measurements


def test_the_stated_base_gives_the_efficiency_digit_for_digit(tmp_path):
    store(tmp_path / "a", csv_facts(tmp_path, cells()))
    (row,) = scaling(tmp_path)
    assert (row["origin"], row["source"], row["source_url"]) == ("published", "Example 2020", f"{URL}/README.md#L1")
    assert row.model == "ResNet-50 (published)", "every name says so"
    assert (row["own_base_gpus"], row["own_base_sample_time_s"]) == (1, 0.01)
    (run,) = tables_of(tmp_path).run_rows
    assert run["throughput_samples_per_s"] == pytest.approx(760.0)
    assert run["throughput_samples_per_s_per_gpu"] == pytest.approx(760.0 / 8)
    assert row["speedup_vs_own_base"] == pytest.approx(7.6, rel=1e-12)
    assert row["efficiency_vs_own_base"] == pytest.approx(0.95, rel=1e-12)


def test_without_a_base_there_is_no_efficiency(tmp_path):
    store(tmp_path / "a", csv_facts(tmp_path, cells(base_gpus="", base_value="")))
    (row,) = scaling(tmp_path)
    assert row["throughput_samples_per_s"] == pytest.approx(760)
    assert (row["efficiency"], row["efficiency_vs_own_base"], row["speedup_vs_own_base"]) == (None, None, None)


def test_repeats_of_a_folder_are_one_measurement_and_its_base_the_smaller_system(tmp_path):
    write_results(tmp_path / "logs" / "two", *[events()] * 2, events((104_000, 100_000, 102_000, 100_000)))
    small = events(SLOW)
    next(one for one in small if one["key"] == "global_batch_size")["value"] = 256
    write_results(tmp_path / "logs" / "one", small, number_of_nodes="1")
    facts, left_out = read_results(tmp_path / "logs", "MLPerf", URL, "horovod")
    assert left_out == []
    store(tmp_path / "a", facts)
    one, two = sorted(scaling(tmp_path / "a"), key=lambda row: row["gpus"])
    assert (one["gpus"], one["runs_ok"], one["efficiency_vs_own_base"]) == (4, 1, 1.0)
    assert (two["gpus"], two["runs_ok"], two["time_to_train_s"]) == (8, 3, 409.0)
    assert two["efficiency_vs_own_base"] == pytest.approx(180 * 4 / (100 * 8))
    assert two["learning"] is not None


def test_no_published_row_is_a_repeat_or_a_base_of_an_own_one(tmp_path):
    """Not even where its configuration is the same, as a file that was edited could have it."""
    folder = records.write_run(tmp_path / "own", framework="single", gpus=1, rate=100)
    records.write_run(tmp_path / "own", gpus=4, rate=300)
    alone = {row["measurement"]: row.row for row in scaling(tmp_path / "own")}
    forged = json.loads((folder / "run.json").read_text()) | {"run_id": "forged", "origin": "own"}
    forged["summary"]["throughput_samples_per_s"] = 400.0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "published.jsonl").write_text(json.dumps(forged) + "\n")
    rows = scaling(tmp_path / "own", tmp_path / "other")
    both = {row["measurement"]: row.row for row in rows if row["origin"] == "own"}
    assert both == alone
    (published,) = [row for row in rows if row["origin"] == "published"]
    assert (published["runs_ok"], published["throughput_samples_per_s"]) == (1, 400.0)
    assert published["comparison"] not in {row["comparison"] for row in both.values()}


def test_own_rows_come_first(tmp_path):
    store(tmp_path / "a", csv_facts(tmp_path, cells(model="AlexNet")))
    records.write_run(tmp_path / "own")
    assert [row["origin"] for row in scaling(tmp_path)] == ["own", "published"]


def test_an_efficiency_above_100_percent_is_named_as_published(tmp_path):
    store(tmp_path / "a", csv_facts(tmp_path, cells(measured=880, step_ms="")))
    (warning,) = tables_of(tmp_path).warnings
    name = "published, Example 2020: DDP, ResNet-50, 8 GPUs, one GPU count, 512 samples an update"
    assert warning.startswith(f"{name}: efficiency_vs_own_base of 110.0 % is above 100 %")


def test_lines_that_cannot_be_read_are_rows_with_a_reason(tmp_path):
    store(tmp_path / "a", csv_facts(tmp_path, cells()))
    path = tmp_path / "a" / "published.jsonl"
    path.write_text(path.read_text() + '{"schema_version": 2\n{"schema_version": 9}\n{"schema_version": 2}\n\x1b\n')
    tables = tables_of(tmp_path)
    assert tables.runs["status"].tolist() == ["ok", *["unreadable"] * 4]
    assert [text.partition(":")[2][:1] for text in tables.warnings] == ["2", "3", "4", "5"], "the number of the line"
    assert all(text.isprintable() for text in tables.warnings)


def test_a_copy_of_the_file_counts_once(tmp_path):
    store(tmp_path / "a", csv_facts(tmp_path, cells(), cells(model="VGG-16")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    tables = tables_of(tmp_path)
    assert len(tables.runs) == 2
    assert tables.left_out == "left out: 2 copies"


def test_no_content_makes_a_report_fail(tmp_path):
    (facts,) = csv_facts(tmp_path, cells())
    sections = ("config", "summary", "published", "epochs", "launch", "environment")
    odd = list(product(sections, (None, 3, "x", [], [[]], {"x": {}})))
    lines = [record_of(facts) | {"run_id": f"odd-{n}", section: value} for n, (section, value) in enumerate(odd)]
    (tmp_path / "published.jsonl").write_text("\n".join(map(json.dumps, lines)))
    runs = tables_of(tmp_path).runs
    assert set(runs["run_id"]) == {f"odd-{n}" for n in range(len(odd))}
