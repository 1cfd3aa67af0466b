from __future__ import annotations

import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddlbench import heartbeat
from ddlbench.heartbeat import Heartbeat, Process, server_time
from tests.support.waiting import wait_until


def test_a_process_is_alive_until_it_ends_also_while_nobody_has_collected_it() -> None:
    child = subprocess.Popen(["sleep", "600"])
    process = replace(Process.this(), pid=child.pid, started=heartbeat._started(child.pid))
    assert process.alive()
    child.kill()
    wait_until(lambda: process.alive() is False)  # a zombie
    child.wait()
    assert process.alive() is False


def test_a_process_number_that_was_given_again_is_another_process() -> None:
    assert Process.this().alive()
    assert replace(Process.this(), started=Process.this().started + 60).alive() is False


def test_nothing_is_known_of_a_process_on_another_host() -> None:
    assert replace(Process.this(), place="elsewhere").alive() is None


def test_nothing_is_known_of_a_process_of_another_user_that_proc_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on login nodes, whose /proc is mounted with hidepid=2: only kill(2) says that there is such a process."""

    def hidden(pid: int) -> float:
        raise psutil.NoSuchProcess(pid)

    def refused(pid: int, number: int) -> None:
        raise PermissionError

    this = Process.this()
    monkeypatch.setattr(heartbeat, "_started", hidden)
    monkeypatch.setattr(os, "kill", refused)
    assert this.alive() is None


@pytest.mark.parametrize("odd", [{"pid": 2**31}, {"pid": 0}, {"started": 10**400}, {"started": math.nan}])
def test_numbers_that_no_process_has_are_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="is no process"):
        replace(Process.this(), **odd)


def test_the_identity_does_not_move_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil adds the time of the boot, which moves when the clock is set."""
    before = Process.this()
    monkeypatch.setattr("psutil.Process.create_time", lambda self: 0.0)
    assert before.alive()
    assert before.started < 1e9  # seconds since the boot, not since 1970


def test_a_heartbeat_renews_the_time_of_its_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    file = tmp_path / "file"
    file.write_text("content")
    os.utime(file, (0, 0))
    beats = Heartbeat(file)
    wait_until(lambda: file.stat().st_mtime > 0)
    assert file.read_text() == "content"
    assert abs(server_time(tmp_path) - file.stat().st_mtime) < 60
    beats.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_heartbeat_ends_with_its_file_and_does_not_make_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    file = tmp_path / "file"
    file.touch()
    beats = Heartbeat(file)
    file.unlink()
    wait_until(lambda: not beats.thread.is_alive())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_gives_this_hosts_time(tmp_path: Path) -> None:
    assert server_time(tmp_path / "nowhere") > 1e9


def test_a_file_that_is_no_heartbeat_says_nothing_of_a_process(tmp_path: Path) -> None:
    """Neither a pipe that nobody writes nor JSON that is nested too deep ends or holds the run that looks."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000)
    assert not heartbeat.has_ended(tmp_path / "pipe")
    assert not heartbeat.has_ended(tmp_path / "deep")
    assert heartbeat.has_ended(tmp_path / "none")
