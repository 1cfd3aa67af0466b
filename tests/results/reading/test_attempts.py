"""Reading folders of results: each folder once, also through links; no content makes the report fail; what the numbers
leave out is counted in one line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ddlbench.foreign import LARGEST_BYTES
from ddlbench.record.schema import READ_VERSIONS
from ddlbench.results.reading.attempts import read, search
from tests.support.records import attempts_of, tables_of, write_run


def attempt(*parts):
    folder = parts[0].joinpath(*parts[1:], "attempt-1")
    folder.mkdir(parents=True)
    return folder


def test_every_attempt_at_any_depth(tmp_path):
    folders = [attempt(tmp_path, "run"), attempt(tmp_path, "a", "b", "c", "d", "run"), attempt(tmp_path, ".old", "run")]
    assert set(search([tmp_path]).folders) == set(folders)


@pytest.mark.parametrize("linked", [".", "elsewhere", "elsewhere/run", "elsewhere/run/attempt-1"])
def test_links_to_results_runs_and_attempts_are_followed(tmp_path, linked):
    folder = attempt(tmp_path, "there", "elsewhere", "run")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "link").symlink_to(tmp_path / "there" / linked)
    result = search([tmp_path / "results"])
    assert [found.resolve() for found in result.folders] == [folder.resolve()]
    assert result.notes == []


def test_circles_end_and_the_real_folder_is_the_one_that_is_named(tmp_path):
    folder = attempt(tmp_path, "z", "run")
    for place, target in (("a", "."), ("b", "z"), ("z/run/up", "../.."), ("z/run/attempt-1/self", "."), ("c", "b")):
        (tmp_path / place).symlink_to(target)
    result = search([tmp_path, tmp_path])
    assert result.folders == [folder]
    assert result.notes == []


def test_a_link_hides_nothing_that_lies_deeper(tmp_path):
    folder = attempt(tmp_path, "z", "1", "2", "3", "4", "run")
    (tmp_path / "a").symlink_to("z")
    assert search([tmp_path]).folders == [folder]


def test_below_a_link_to_much_only_what_may_be_results(tmp_path):
    attempt(tmp_path, "home", "project", "results", "run")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "link").symlink_to(tmp_path)
    assert search([tmp_path / "results"]).folders == []
    assert len(search([tmp_path / "results", tmp_path / "home" / "project"]).folders) == 1


def test_broken_links_are_named(tmp_path):
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "file").symlink_to(os.devnull)
    assert [note.text for note in search([tmp_path]).notes] == [
        f"{tmp_path}/gone cannot be read (No such file or directory)",
        f"{tmp_path}/self cannot be read (Too many levels of symbolic links)",
    ]


def test_what_has_the_name_of_an_attempt_and_is_no_folder_is_named(tmp_path):
    attempt(tmp_path, "run")
    os.mkfifo(tmp_path / "run" / "attempt-2")
    (tmp_path / "run" / "attempt-3").write_text("")
    (tmp_path / "run" / "attempt-4").symlink_to(os.devnull)
    (tmp_path / "run" / "attempt-5").symlink_to("nowhere")
    (tmp_path / "run" / "attempt-1.tar").write_text("")
    reasons = dict.fromkeys((2, 3, 4), "it is not a folder") | {5: "No such file or directory"}
    assert [note.text for note in search([tmp_path]).notes] == [
        f"{tmp_path}/run/attempt-{number} cannot be read ({reason})" for number, reason in reasons.items()
    ]


def test_every_attempt_once_however_it_is_reached(tmp_path):
    first = write_run(tmp_path / "a", repeat=0)
    write_run(tmp_path / "a", repeat=1, attempt=2)
    write_run(tmp_path / "b", repeat=2)
    result = attempts_of(tmp_path / "a", tmp_path / "b", tmp_path / "a", first.parent, first)
    assert len(result) == 3
    assert [len(attempt.epochs) for attempt in result] == [3, 3, 3]


def test_paths_stay_as_they_were_given(tmp_path, monkeypatch):
    write_run(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert not attempts_of(Path("results"))[0].path.is_absolute()


@pytest.mark.parametrize("content", [None, "", "[1, 2]", "\x00"])
def test_a_broken_or_missing_record_is_an_attempt_with_a_reason(tmp_path, content):
    folder = tmp_path / "ddp-resnet50-native-2x-12345678" / "attempt-3"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "run.json").write_text(content)
    attempt = read(folder)
    names = ("run_id", "attempt", "status")
    assert [attempt.record[name] for name in names] == ["ddp-resnet50-native-2x-12345678", 3, "unreadable"]
    said = "run.json cannot be read (" + ("No such file or directory)" if content is None else "")
    assert attempt.record["reason"].startswith(said)
    assert attempt.record["reason"] in attempt.notes[0].text


@pytest.mark.parametrize("version", [0, 3, None, "1"])
def test_another_version_is_refused_with_both_numbers(tmp_path, version):
    folder = write_run(tmp_path, sections={"schema_version": version})
    attempt = read(folder)
    assert attempt.record["status"] == "unreadable"
    assert f"schema_version {version} is refused, this ddlbench reads 1 and 2" in attempt.record["reason"]
    remedies = {0: "it is older: run again, or report with the version", 3: "it is newer: update ddlbench"}
    assert remedies.get(version, "reads 1 and 2: run again, or report with the version") in attempt.record["reason"]
    assert "config" not in attempt.record, "nothing of it is used"
    assert attempt.epochs == []


@pytest.mark.parametrize("version", READ_VERSIONS)
def test_a_record_of_an_earlier_version_is_read(tmp_path, version):
    attempt = read(write_run(tmp_path, sections={"schema_version": version}))
    assert (attempt.record["status"], attempt.record["schema_version"], len(attempt.epochs)) == ("ok", version, 3)


def test_the_line_of_what_is_left_out_has_none_one_or_several(tmp_path):
    write_run(tmp_path / "a")
    assert tables_of(tmp_path).left_out is None
    for name in ("b", "c"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
    (write_run(tmp_path / "d") / "run.json").unlink()
    assert tables_of(tmp_path).left_out == "left out: 1 unreadable, 2 copies"


def replaced(results, number, content):
    """An attempt with another run.json: a text, or what a function makes."""
    file = write_run(results, gpus=2, repeat=number) / "run.json"
    file.unlink()
    if isinstance(content, str):
        file.write_text(content)
    else:
        content(file)


def large(file):
    with file.open("wb") as opened:
        opened.truncate(LARGEST_BYTES + 1)


def test_what_is_in_no_measurement_or_in_no_time_is_counted(tmp_path):
    write_run(tmp_path)
    bare = write_run(tmp_path, gpus=2, sections={"config": None})
    write_run(tmp_path, gpus=4, sections={"summary": {}})
    write_run(tmp_path, gpus=8, status="oom")
    tables = tables_of(tmp_path)
    assert tables.left_out == "left out: 1 without a configuration, 1 ended ok without a rate"
    assert tables.warnings == [f"{bare}: run.json has no configuration: the attempt is in no measurement"]
    assert list(tables.scaling["gpus"].unique()) == [1, 4, 8]


def test_every_kind_is_counted(tmp_path):
    """A good run beside one of each kind, two of some."""
    write_run(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "backup")
    texts = ("{", "[]", *(f'{{"schema_version": {version}}}' for version in ("2", '"a"', "99", "0")))
    for number, content in enumerate((os.mkfifo, os.mkfifo, large, lambda file: file.symlink_to(file.name), *texts)):
        replaced(tmp_path, number, content)
    write_run(tmp_path, gpus=4, status="running")
    write_run(tmp_path, gpus=8, sections={"launch": {"world_size": 8, "backend": "nccl (shared GPU)"}})
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "gone").symlink_to("nowhere")
    (write_run(tmp_path, gpus=16) / "epochs.jsonl").write_text('{"epoch": 0}\n{"epoch"')
    tables = tables_of(tmp_path)
    assert tables.left_out == (
        "left out: 1 unreadable, 3 not JSON of a run, 2 no regular files, 1 too large, 2 links in circles, "
        "1 of a newer schema, 1 of an older schema, 1 folder or link that cannot be followed, 1 copy, "
        "1 ended ok without a rate, 1 still running or killed, 1 epochs.jsonl that cannot be read whole, "
        "1 of ranks that shared a GPU"
    )
    assert len(tables.runs) == 14, "all but the copy are rows"
    assert tables.runs.loc[tables.runs["status"] != "ok", "reason"].notna().all()
    assert "unreadable" not in set(tables.scaling["status"]), "they have no configuration to stand for"
