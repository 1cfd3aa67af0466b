"""Each cell has one owner, whichever process ends first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ddlbench.errors import UserError
from ddlbench.heartbeat import SILENT_S
from ddlbench.sweep import local
from ddlbench.sweep.local import _turn
from ddlbench.sweep.lock import FOLDER, Claim, Owner, claim, holder, last_claim, queue
from tests.support.disk import largest_file
from tests.support.processes import environment, program
from tests.support.waiting import wait_until

TAKE = """
import sys, time
from pathlib import Path
from ddlbench.sweep.lock import claim
print("ready", flush=True)
sys.stdin.readline()
print(claim(Path(sys.argv[1]), "cell") is not None, flush=True)
sys.stdin.readline()
"""


def taken(results: Path, cell: str = "cell", **how: Any) -> Claim:
    """A claim that nobody else holds."""
    held = claim(results, cell, **how)
    assert held is not None
    return held


def test_a_second_claim_waits_for_the_release_of_the_one_before(tmp_path: Path) -> None:
    held = taken(tmp_path)
    assert claim(tmp_path, "cell") is None
    assert holder(tmp_path, "cell") == Owner.this()
    taken(tmp_path, "other").release()
    held.release()
    assert holder(tmp_path, "cell") is None
    taken(tmp_path).release()


def test_a_claim_that_a_full_disk_does_not_take_holds_no_cell(tmp_path: Path) -> None:
    taken(tmp_path).release()
    with (
        largest_file(0),
        pytest.raises(UserError, match=r"/cell\.2 cannot be written \(File too large\): free space or"),
    ):
        claim(tmp_path, "cell")
    assert last_claim(tmp_path, "cell") == (None, None)
    taken(tmp_path).release()


def test_of_many_processes_one_gets_the_claim_also_after_its_owner_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKE, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment()) for _ in range(5)]

    def take(*takers: subprocess.Popen[str]) -> list[bool]:
        """Whether each got the claim, which it then keeps; all try at once."""
        for taker in takers:
            taker.stdin.write("\n")
            taker.stdin.flush()
        return [taker.stdout.readline() == "True\n" for taker in takers]

    first, *others = processes
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 5
        assert take(first) == [True]
        assert claim(tmp_path, "cell") is None
        first.kill()
        first.wait()
        assert sum(take(*others)) == 1
        assert claim(tmp_path, "cell") is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["cell.1", "cell.2"]


def foreign(folder: Path) -> Path:
    """A claim of another host."""
    path = folder / FOLDER / "cell.1"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(asdict(replace(Owner.this(), place="elsewhere"))))
    return path


def silence(path: Path) -> None:
    past = time.time() - SILENT_S - 60
    os.utime(path, (past, past))


def test_the_owner_on_another_host_is_alive_while_its_heartbeat_is(tmp_path: Path) -> None:
    path = foreign(tmp_path)
    assert claim(tmp_path, "cell") is None
    silence(path)
    held = taken(tmp_path)
    assert not held.lost()
    held.release()


def test_a_process_number_given_anew_is_another_process(tmp_path: Path) -> None:
    foreign(tmp_path).write_text(json.dumps(asdict(replace(Owner.this(), started=1.0))))
    taken(tmp_path).release()


@pytest.mark.parametrize(
    "wrong",
    [
        {"pid": -1}, {"pid": 0}, {"pid": True}, {"pid": "1"}, {"pid": None}, {"place": []}, {"started": "now"},
        {"job": 3}, {"job": "a,b"}, {"job": "ddlbench-a,other"}, {"job": "--me"}, {"more": 1},
    ],
)  # fmt: skip
def test_what_no_sweep_has_written_names_nobody(tmp_path: Path, wrong: dict[str, object]) -> None:
    """Else --cancel would send signals to processes and cancel jobs that have nothing to do with a study."""
    path = tmp_path / FOLDER / "cell.1"
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(Owner.this()) | wrong))
    assert holder(tmp_path, "cell") is None
    assert claim(tmp_path, "cell") is None  # somebody may be writing it
    assert last_claim(tmp_path, "cell") == (path, None)
    silence(path)
    held = taken(tmp_path)
    assert last_claim(tmp_path, "cell") == (held.path, Owner.this())
    held.release()
    assert last_claim(tmp_path, "cell") == (None, None)


def test_a_claim_that_changed_since_the_caller_looked_holds(tmp_path: Path) -> None:
    """What its owner has done since is not known to the caller."""
    held = taken(tmp_path)
    held.release()
    released = held.path.stat().st_mtime
    assert claim(tmp_path, "cell", read_at=released - 1) is None
    after = taken(tmp_path, read_at=released + 1)
    after.release()
    to_come = time.time() + 3600  # the clock of the file server was set back since
    os.utime(after.path, (to_come, to_come))
    taken(tmp_path, read_at=time.time()).release()


def test_a_claim_of_a_slurm_job_holds_while_the_job_is_queued(tmp_path: Path) -> None:
    taken(tmp_path, job="ddlbench-sweep-1")
    path = tmp_path / FOLDER / "cell.1"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 2**22 + 1}))  # sbatch and its sweep have ended
    assert claim(tmp_path, "cell", queued=lambda job: job == "ddlbench-sweep-1") is None
    taken(tmp_path, queued=lambda job: False).release()


def test_neither_filters_of_the_user_nor_names_of_others_that_are_not_utf_8_hide_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = r"printf 'M\344rz 11 0\nddlbench-sweep-1 12 2\n'"
    program(tmp_path / "squeue", f'#!/bin/sh\n[ -z "$SQUEUE_STATES" ] && {said}\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_STATES", "R")
    assert (queue().starts or {})["ddlbench-sweep-1"] == ("12", "2")


def test_a_sweep_waits_for_another_one_on_this_machine_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their temporary folders differ, as those of two jobs on one node do."""
    monkeypatch.setattr(local, "TURN", tmp_path / "turn")  # a real sweep may run here
    said, entered = list[str](), threading.Event()

    def second() -> None:
        with _turn(said.append):
            entered.set()

    with _turn(said.append):
        assert said == []
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        thread = threading.Thread(target=second)
        thread.start()
        wait_until(lambda: said)
        assert not entered.is_set()
    thread.join(60)
    assert entered.is_set()
    assert said == ["waiting: another sweep runs a cell on this machine"]


def test_the_turn_is_of_one_user() -> None:
    assert str(os.getuid()) in local.TURN.name
