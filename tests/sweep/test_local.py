"""Sweeps with real runs on this machine: no cell runs twice and no process is left, whichever process ends first."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ddlbench.sweep.local import run_cell
from ddlbench.sweep.state import State
from tests.support.faults import patience_s
from tests.support.processes import environment, run
from tests.support.waiting import WITHIN_S, wait_until
from tests.sweep.studies import KEYS, SINGLE, ddp, planned, ranks, statuses, write

pytestmark = [pytest.mark.slow]


def sweep(study: Path, results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "ddlbench.sweep", study, f"results_dir={results}", "--local", *words)
    return run(*command)


def start(study: Path, results: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ddlbench.sweep", str(study), f"results_dir={results}", "--local"]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment(), start_new_session=True)


def test_a_sweep_runs_every_cell_and_then_only_what_is_missing(tmp_path: Path) -> None:
    """single on 2 ranks is unsupported: a row."""
    study, results = write(tmp_path, exclude=[{"framework": "ddp", "gpus": 1}]), tmp_path / "results of mine"
    done = sweep(study, results)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = Counter({"single 1 ok": 1, "ddp 2 ok": 1, "single 2 unsupported": 1})
    assert statuses(results) == expected
    assert "3 cells: ok 2, unsupported 1" in done.stdout
    (missing,) = results.glob("single-*-1x-*")
    for path in missing.rglob("*"):
        path.unlink() if path.is_file() else None
    before = {path: path.stat().st_mtime for path in results.glob("*/attempt-*/run.json")}
    again = sweep(study, results)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("repeat 0: ") == 1
    assert statuses(results) == expected
    assert all(path.stat().st_mtime == time_ for path, time_ in before.items())


def test_a_failed_cell_is_a_row_and_runs_again_only_when_asked(tmp_path: Path) -> None:
    """A folder of images that does not exist ends a run before it has a record; a learning rate of 1e30 diverges."""
    keys = KEYS | {"recipe.optimizer.lr": 1e30, "train.steps": 8, "train.epochs": 2}
    study, results = write(tmp_path, **SINGLE, keys=keys), tmp_path / "results"
    done = sweep(study, results)
    assert done.returncode == 1, done.stdout
    assert statuses(results) == {"single 1 diverged": 1}
    assert "diverged: " in done.stdout
    assert sweep(study, results).returncode == 0
    assert statuses(results) == {"single 1 diverged": 1}
    assert sweep(study, results, "--retry", "oom").returncode == 0
    assert sweep(study, results, "--retry", "failed").returncode == 1
    assert statuses(results) == {"single 1 diverged": 2}


def test_two_sweeps_at_once_run_each_cell_once(tmp_path: Path) -> None:
    study, results = write(tmp_path, **SINGLE, repeats=3), tmp_path / "results"
    racing = [start(study, results) for _ in range(2)]
    outputs = [process.communicate(timeout=WITHIN_S) for process in racing]
    assert [process.returncode for process in racing] == [0, 0], outputs
    assert statuses(results) == {"single 1 ok": 3}
    assert sum(out.count(": ok (") for out, _ in outputs) == 3


def test_after_a_kill_no_process_is_left_and_the_sweep_goes_on(tmp_path: Path) -> None:
    keys = KEYS | {"train.steps": 40}
    study, results = write(tmp_path, **ddp(2), keys=keys, repeats=3), tmp_path / "results"
    killed = start(study, results)
    wait_until(lambda: statuses(results)["ddp 2 ok"] == 1 and statuses(results)["ddp 2 running"] == 1)
    killed.kill()
    killed.communicate()
    wait_until(lambda: not ranks(results))
    assert statuses(results)["ddp 2 ok"] in (1, 2)  # the second may have ended just then
    again = sweep(study, results)
    assert again.returncode == 0, again.stderr
    assert statuses(results)["ddp 2 ok"] == 3
    state = State(results).refresh()
    assert [sum(one.status == "ok" for one in state.of(cell)) for cell in planned(study)] == [1, 1, 1]


def test_ctrl_c_ends_the_ranks_and_the_cell_is_still_to_run(tmp_path: Path) -> None:
    keys = KEYS | {"train.epochs": 100_000}
    study, results = write(tmp_path, **ddp(2), keys=keys), tmp_path / "results"
    process = start(study, results)
    wait_until(lambda: statuses(results)["ddp 2 running"] == 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert "interrupted; cells that have ended are kept; to continue: " in err
    assert not ranks(results)
    assert statuses(results) == {"ddp 2 killed": 1}
    (cell,) = planned(study)
    assert State(results).refresh().status(cell) == "missing"


def test_the_time_limit_ends_a_cell_and_the_next_one_runs(tmp_path: Path) -> None:
    keys = KEYS | {"train.epochs": 100_000}
    study, results = write(tmp_path, **SINGLE, keys=keys), tmp_path / "results"
    limit_s = int(60 + 4 * patience_s())  # a process that is still starting would end by the signal itself
    (cell,) = planned(study, f"limit_s={limit_s}")
    began = time.monotonic()
    assert run_cell(cell, results)[0] == [128 + signal.SIGUSR1]
    assert time.monotonic() - began >= limit_s
    assert State(results).refresh().status(cell) == "killed"
