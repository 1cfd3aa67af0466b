"""A report made by several processes is the one that a single process makes, to the last byte."""

from __future__ import annotations

import json
import shutil

import pytest

from ddlbench.report import saving, spreadsheets, tables
from ddlbench.report.figures import make_figures
from ddlbench.report.read import read_all
from tests.support.records import weak_scaling, write_run


@pytest.fixture
def results(tmp_path):
    """Good runs, and between them in the order of reading what cannot be read whole."""
    folder = tmp_path / "results"
    weak_scaling(folder, repeats=2)
    broken, half, odd, foreign = (write_run(folder, gpus=4, rate=270.0, repeat=repeat) for repeat in range(2, 6))
    (broken / "run.json").write_text('{"schema_version": 2, "run_id"')
    (half / "epochs.jsonl").write_text((half / "epochs.jsonl").read_text() + '{"epoch": 3, "epo')
    (odd / "epochs.jsonl").write_text('{"epoch": 0, "val_top1": 7, "throttle_reasons": "\\u001bheat"}\n{"epoch": 1}\n')
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
    found = tables.make_tables(read_all([results]), processes=2)
    found.write(tmp_path / "two", threads=2)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["breakdown.csv", "epochs.csv", "learning.csv", "runs.csv", "scaling.csv"]
    for name in files:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert (found.warnings, found.left_out, found.drift) == (alone.warnings, alone.left_out, alone.drift)
    assert alone.left_out == "left out: 2 unreadable, 1 copy, 1 epochs.jsonl that cannot be read whole"
    assert len(alone.warnings) == 6, alone.warnings


def test_figures(results, tmp_path):
    figures = make_figures(tables.make_tables(read_all([results]))).figures
    saving.save(figures, tmp_path / "one")
    saving.save(figures, tmp_path / "two", processes=2)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 3 * len(figures) > 3
    for name in files:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
