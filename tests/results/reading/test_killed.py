"""Which records that say `running` are those of killed runs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from errno import EROFS
from pathlib import Path

import pytest

from ddlbench.heartbeat import Process
from ddlbench.record.files import HEARTBEAT, find_killed, keeper_alive
from ddlbench.results.reading.attempts import read
from tests.support.killed import beat, ended_process
from tests.support.records import attempts_of, edited, tables_of, write_run

ELSEWHERE = replace(Process.this(), place="another host")


def running(results: Path, process: Process, seconds_ago: float) -> Path:
    """The folder of a run that says `running`; the last heartbeat of its process is so old."""
    folder = write_run(results, status="running")
    beat(folder, process, seconds_ago)
    return folder


@pytest.mark.parametrize(
    ("process", "seconds_ago", "gone"),
    [
        (Process.this(), 5, False),
        (Process.this(), 86_400, False),  # a laptop that slept, a clock that was set
        (ended_process(), 5, False),  # other ranks may still be writing the end
        (ended_process(), 60, True),
        (ended_process(), -60, True),  # the clock was set back meanwhile
        (ELSEWHERE, 60, False),
        (ELSEWHERE, 300, True),
    ],
)
def test_a_run_is_gone_when_no_process_of_it_is_left(
    tmp_path: Path, process: Process, seconds_ago: float, gone: bool
) -> None:
    beat(tmp_path, process, seconds_ago)
    assert (find_killed(tmp_path) is not None) == gone


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"pid": 1}', '{"place": [], "pid": {}, "started": ""}', "x" * 10_000]
)
def test_a_heartbeat_that_others_wrote_is_no_evidence(tmp_path: Path, content: str) -> None:
    (tmp_path / HEARTBEAT).write_text(content)
    os.utime(tmp_path / HEARTBEAT, (0, 0))
    assert find_killed(tmp_path) is None


def test_a_pipe_in_the_place_of_a_heartbeat_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / HEARTBEAT)
    assert find_killed(tmp_path) is None


@pytest.mark.parametrize("key", ["pid", "started", "place"])
def test_a_heartbeat_names_a_process_and_no_file(tmp_path: Path, key: str) -> None:
    os.mkfifo(tmp_path / "stat")
    content = vars(Process.this()) | {key: f"../..{tmp_path}"}
    (tmp_path / HEARTBEAT).write_text(json.dumps(content))
    with contextlib.suppress(TypeError):
        assert keeper_alive(tmp_path) is None


@pytest.mark.parametrize("when", [-(10**19), 253_402_300_799, 253_402_300_800, 10**12, 10**19])
def test_a_heartbeat_of_any_year_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """A clock that was never set, or a file that others wrote, also beyond the calendar, which ends with the year 9999.
    File systems such as ext4 keep no such time, others do."""
    folder = running(tmp_path, ELSEWHERE, 0)
    stat = Path.stat

    def late(path: Path, **how: bool) -> os.stat_result:
        result = stat(path, **how)
        return os.stat_result((*tuple(result)[:8], when, when)) if path.name == HEARTBEAT else result

    monkeypatch.setattr(Path, "stat", late)
    assert read(folder).record["status"] in ("running", "killed")


def test_the_report_calls_it_killed_and_changes_no_file(tmp_path: Path) -> None:
    folder = running(tmp_path, ended_process(), 60)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    (attempt,) = attempts_of(tmp_path)
    assert attempt.record["status"] == "killed"
    assert attempt.record["reason"].startswith("no end was recorded and its process has ended: all ranks were killed")
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_the_clock_of_the_files_counts_and_not_that_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = running(tmp_path, ELSEWHERE, 5)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 300)
    assert read(folder).record["status"] == "running"


def test_a_record_that_may_only_be_read_is_judged_by_the_clock_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = running(tmp_path, ELSEWHERE, 300)

    def refuse(path: Path) -> None:
        raise OSError(EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    assert read(folder).record["status"] == "killed"


def test_an_end_that_was_recorded_counts_more_than_a_copy_from_before(tmp_path: Path) -> None:
    """Copied while the run went on, with its heartbeat, which is old by now."""
    early = write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    with edited(early) as content:
        content["status"] = "running"
    beat(early, ELSEWHERE, 300)
    assert [attempts_of(tmp_path / name)[0].record["status"] for name in "ab"] == ["killed", "ok"]
    assert list(tables_of(tmp_path).runs["status"]) == ["ok"]
