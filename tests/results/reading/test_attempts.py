"""Reading folders of results: no content makes the report fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddlbench.errors import UserError
from ddlbench.record.schema import READ_VERSIONS
from ddlbench.results.reading.attempts import read, read_all
from tests.support import records


def test_every_attempt_once_however_it_is_reached(tmp_path):
    first = records.write_run(tmp_path / "a", repeat=0)
    records.write_run(tmp_path / "a", repeat=1, attempt=2)
    records.write_run(tmp_path / "b", repeat=2)
    result = read_all([tmp_path / "a", tmp_path / "b", tmp_path / "a", first.parent, first]).attempts
    assert len(result) == 3
    assert [len(attempt.epochs) for attempt in result] == [3, 3, 3]


def test_paths_stay_as_they_were_given(tmp_path, monkeypatch):
    records.write_run(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert not read_all([Path("results")]).attempts[0].path.is_absolute()


@pytest.mark.parametrize("content", ['{"schema_version": 1, "run_id"', "", "[1, 2]", "\x00"])
def test_a_broken_record_is_an_attempt_with_a_reason(tmp_path, content):
    folder = tmp_path / "ddp-resnet50-native-2x-12345678" / "attempt-3"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(content)
    attempt = read(folder)
    assert attempt.record["run_id"] == "ddp-resnet50-native-2x-12345678"
    assert attempt.record["attempt"] == 3
    assert attempt.record["status"] == "unreadable"
    assert attempt.record["reason"].startswith("run.json cannot be read (")
    assert attempt.record["reason"] in attempt.notes[0].text


def test_a_folder_without_a_record_is_an_attempt_with_a_reason(tmp_path):
    folder = tmp_path / "run" / "attempt-1"
    folder.mkdir(parents=True)
    assert read(folder).record["reason"] == "run.json cannot be read (No such file or directory)"


@pytest.mark.parametrize("version", [0, 3, None, "1"])
def test_another_version_is_refused_with_both_numbers(tmp_path, version):
    folder = records.write_run(tmp_path, sections={"schema_version": version})
    attempt = read(folder)
    assert attempt.record["status"] == "unreadable"
    assert f"schema_version {version} is refused, this ddlbench reads 1 and 2" in attempt.record["reason"]
    remedies = {0: "it is older: run again, or report with the version", 3: "it is newer: update ddlbench"}
    assert remedies.get(version, "reads 1 and 2: run again, or report with the version") in attempt.record["reason"]
    assert "config" not in attempt.record, "nothing of it is used"
    assert attempt.epochs == []


@pytest.mark.parametrize("version", READ_VERSIONS)
def test_a_record_of_an_earlier_version_is_read(tmp_path, version):
    attempt = read(records.write_run(tmp_path, sections={"schema_version": version}))
    assert (attempt.record["status"], attempt.record["schema_version"], len(attempt.epochs)) == ("ok", version, 3)


def test_an_unfinished_attempt_says_so(tmp_path):
    attempt = read(records.write_run(tmp_path, status="running"))
    assert attempt.record["status"] == "running"
    assert "no end was recorded" in attempt.record["reason"]


def test_half_a_line_is_left_out_with_a_warning(tmp_path):
    folder = records.write_run(tmp_path)
    lines = (folder / "epochs.jsonl").read_text()
    (folder / "epochs.jsonl").write_text(lines + '{"epoch": 3, "epoch_ti\n' + json.dumps([1]))
    assert [row["epoch"] for row in read(folder).epochs] == [0, 1, 2]
    (warning,) = records.tables_of(tmp_path).warnings
    assert warning == f"{folder}: 2 line(s) of epochs.jsonl cannot be read and are left out"


def test_nothing_to_report_names_the_remedy(tmp_path):
    with pytest.raises(UserError, match=r"no run in .*: start one with python -m ddlbench \+framework="):
        read_all([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        read_all([tmp_path / "absent"])
