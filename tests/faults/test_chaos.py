"""The random campaign: its trials follow from their seed, and it sees what it looks for."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.faults.chaos import FAMILIES, SIGNALS, Trial, judge, run, trial
from tests.support.faults import patience_s
from tests.support.killed import beat, ended_process
from tests.support.records import edited, write_run

PLANNED = Trial(0, "ddp", 2, signal.SIGKILL, (0,), 1.0, False)


def test_a_trial_follows_from_the_seed_and_its_number() -> None:
    many = [trial(1, number) for number in range(300)]
    assert many == [trial(1, number) for number in range(300)]
    assert many != [trial(2, number) for number in range(300)]
    assert {one.signal for one in many} == set(SIGNALS)
    assert {one.framework for one in many} >= set(FAMILIES) - {"horovod"}
    assert {len(one.whom) for one in many if one.ranks == 2} == {1, 2}


def left(folder: Path, **changes: object) -> Path:
    """A record as a killed run leaves it: no epoch, the status `error` and a reason."""
    path = write_run(folder, status="error", reason="rank 0 ended", gpus=2)
    with edited(path) as content:
        content.update(changes)
    return path


def lost(folder: Path, before: int = 0, codes: tuple[int, ...] = (-9, 1), still: int = 0) -> tuple[str, ...]:
    return judge(folder, PLANNED, codes, before, 1.0, False, still).lost


def test_a_run_that_ended_as_it_should_has_lost_nothing(tmp_path: Path) -> None:
    left(tmp_path)
    assert lost(tmp_path) == ()


def test_a_run_that_was_killed_as_a_whole_has_lost_nothing(tmp_path: Path) -> None:
    path = left(tmp_path, status="running", reason=None)
    beat(path, ended_process(), 1)
    assert lost(tmp_path) == ()
    assert json.loads((path / "run.json").read_text())["status"] == "killed"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"status": "running"}, "the status is running"),  # and no heartbeat to tell
        ({"status": "ok"}, "the status is ok"),
        ({"status": "unsupported"}, "the status is unsupported"),  # a trial of nothing
        ({"reason": None}, "no reason is given"),
    ],
)
def test_what_is_wrong_with_a_record_is_found(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    left(tmp_path, **changes)
    assert lost(tmp_path) == (problem,)


def test_lost_epochs_processes_and_exit_codes_are_found(tmp_path: Path) -> None:
    left(tmp_path)
    assert lost(tmp_path, before=3) == ("3 epochs are gone",)
    assert lost(tmp_path, still=1) == ("1 processes were left",)
    assert lost(tmp_path, codes=(0, 0)) == ("every exit code is 0",)
    assert lost(tmp_path / "none", before=1) == ("epochs were measured and there is no record",)


@pytest.mark.slow
def test_one_trial(tmp_path: Path) -> None:
    outcome = run(Trial(0, "ddp", 2, signal.SIGKILL, (0, 1), 0.5, False), tmp_path, 4 * patience_s())
    assert (outcome.status, outcome.codes, outcome.lost, outcome.hung) == ("killed", (-9, -9), (), False)
