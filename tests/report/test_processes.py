"""A report made by several processes is the one that a single process makes, to the last byte."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pandas as pd
import pytest

from ddlbench.report.__main__ import write_report
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.reading.cores import Workers
from ddlbench.results.tables import csv_files as spreadsheets
from ddlbench.results.tables import run_rows as rows
from ddlbench.results.tables import tables
from tests.support.records import weak_scaling, write_run


@pytest.fixture
def results(tmp_path):
    """Good runs, and between them in the order of reading what cannot be read whole."""
    folder = tmp_path / "results"
    weak_scaling(folder, repeats=2)
    broken, half, odd, foreign = (write_run(folder, gpus=4, rate=270.0, repeat=repeat) for repeat in range(2, 6))
    (broken / "run.json").write_text('{"schema_version": 2, "run_id"')
    (half / "epochs.jsonl").write_text((half / "epochs.jsonl").read_text() + '{"epoch": 3, "epo')
    (odd / "epochs.jsonl").write_text(
        '{"epoch": 0, "val_top1": 7, "throttle_reasons": "\\u001bheat"}\n{"epoch": 1}\n{"epoch": 2}'
    )
    record = json.loads((foreign / "run.json").read_text())
    (foreign / "run.json").write_text(json.dumps(record | {"summary": {"epoch_time_s": -1}}))
    (folder / "ddp-resnet50-native-2x-nothing" / "attempt-1").mkdir(parents=True)
    shutil.copytree(half, folder / "backup" / "attempt-1")
    return folder


def test_tables(results, tmp_path, monkeypatch):
    monkeypatch.setattr(spreadsheets, "ROWS", 5)
    alone = tables.make_tables(read_all([results]))
    alone.write(tmp_path / "one")
    monkeypatch.setattr(tables, "FEW", 1)
    with Workers(2) as workers:
        found = tables.make_tables(read_all([results]), workers=workers)
    found.write(tmp_path / "two", threads=2)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["breakdown.csv", "epochs.csv", "learning.csv", "runs.csv", "scaling.csv"]
    for name in files:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert (found.warnings, found.left_out, found.drift) == (alone.warnings, alone.left_out, alone.drift)
    assert alone.left_out == (
        "left out: 2 unreadable, 1 copy, 1 ended ok without a rate, 1 epochs.jsonl that cannot be read whole"
    )
    assert len(alone.warnings) == 6, alone.warnings


@pytest.mark.parametrize("bytes_", [0, 1_000])
def test_however_many_files_are_parsed_together(results, monkeypatch, bytes_):
    usual = tables.make_tables(read_all([results]))
    monkeypatch.setattr(rows, "AT_ONCE", bytes_)
    found = tables.make_tables(read_all([results]))
    for name in ("runs", "epochs", "scaling", "learning"):
        pd.testing.assert_frame_equal(getattr(found, name), getattr(usual, name))
    assert found.warnings == usual.warnings


def test_whole_reports(results, tmp_path, monkeypatch):
    """Of figures that other processes save while this one goes on."""
    monkeypatch.setattr(tables, "FEW", 1)
    for folder, processes in (("one", 1), ("two", 2)):
        with Workers(processes) as workers:
            write_report(tables.make_tables(read_all([results]), workers=workers), tmp_path / folder, workers=workers)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    kinds = Counter(path.suffix for path in files)
    assert kinds[".png"] == kinds[".svg"] == kinds[".pdf"] > 3
    assert (kinds[".csv"], kinds[".html"]) == (5, 1)
    for path in files:
        if path.suffix != ".html":  # it says when it was made
            assert (tmp_path / "two" / path).read_bytes() == (tmp_path / "one" / path).read_bytes(), path
