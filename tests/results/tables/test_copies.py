"""Folders that hold one attempt are one row; repeats stay repeats."""

from __future__ import annotations

import shutil

import pytest

from ddlbench.results.tables.tables import records
from tests.support.records import edited, tables_of, write_run


def test_six_copies_are_no_six_repeats(tmp_path):
    folder = write_run(tmp_path / "results")
    for number in range(5):
        shutil.copytree(tmp_path / "results", tmp_path / f"backup{number}")
    tables = tables_of(tmp_path)
    (row,) = records(tables.scaling)
    assert (row["runs_ok"], row["interval"], row["sample_time_low_s"]) == (1, "n=1, no 95 % CI", None)
    assert len(tables.runs) == 1
    assert len(tables.epochs) == 3
    first, copy = (tmp_path / place / folder.relative_to(tmp_path / "results") for place in ("backup0", "results"))
    assert len(tables.warnings) == 5
    assert (
        f"{copy} and {first} hold the same attempt (run_id, attempt, start): only the latter counts" in tables.warnings
    )


@pytest.mark.parametrize("place", ["attempt-1.bak", "attempt-1/attempt-1", "attempt-1 (copy)", "../other/attempt-7"])
def test_a_copy_in_any_folder_counts_once(tmp_path, place):
    folder = write_run(tmp_path)
    shutil.copytree(folder, tmp_path / "aside")
    (folder.parent / place).parent.mkdir(exist_ok=True)
    (tmp_path / "aside").rename(folder.parent / place)
    tables = tables_of(tmp_path)
    assert list(tables.scaling["runs_ok"]) == [1]
    assert len(tables.warnings) == 1


def test_six_real_repeats_stay_six(tmp_path):
    for repeat in range(3):
        write_run(tmp_path, repeat=repeat)
        write_run(tmp_path, repeat=repeat, attempt=2)
    tables = tables_of(tmp_path)
    assert list(tables.scaling["runs_ok"]) == [6]
    assert tables.warnings == []


def test_the_same_command_at_another_time_is_a_repeat(tmp_path):
    """Two results_dir, each with a first attempt at the same run."""
    write_run(tmp_path / "a")
    times = {"start": "2026-01-01T10:00:00.001+00:00", "end": None}
    write_run(tmp_path / "b", sections={"times": times})
    assert list(tables_of(tmp_path).scaling["runs_ok"]) == [2]


@pytest.mark.parametrize("early", ["a", "b"])
def test_the_later_state_counts_where_a_copy_was_made_during_the_run(tmp_path, early):
    for place in ("a", "b"):
        folder = write_run(tmp_path / place)
        if place == early:
            with edited(folder) as record:
                record |= {"status": "running", "summary": {}}
            lines = (folder / "epochs.jsonl").read_text().splitlines(keepends=True)
            (folder / "epochs.jsonl").write_text(lines[0])
    tables = tables_of(tmp_path)
    assert list(tables.runs["status"]) == ["ok"]
    assert len(tables.epochs) == 3
    assert f"{tmp_path / early}" in tables.warnings[0].split(" and ")[0]
    assert "though their content differs" in tables.warnings[0]


def test_without_a_start_only_equal_records_are_copies(tmp_path):
    for place, rate in (("a", 100.0), ("b", 100.0), ("c", 101.0)):
        write_run(tmp_path / place, rate=rate, sections={"times": {"start": None}})
    assert list(tables_of(tmp_path).scaling["runs_ok"]) == [2]


def test_unreadable_records_are_all_there(tmp_path):
    for place in ("a", "b"):
        (write_run(tmp_path / place) / "run.json").write_text("{")
    assert list(tables_of(tmp_path).runs["status"]) == ["unreadable", "unreadable"]
