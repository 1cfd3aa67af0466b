"""Sweeps with real runs on this machine: no cell runs twice and no process is left, whichever process ends first."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from ddlbench.sweep.local import run_cell, run_cells
from ddlbench.sweep.state import State
from tests.support.faults import patience_s
from tests.support.processes import environment
from tests.support.waiting import WITHIN_S, wait_until
from tests.sweep.studies import KEYS, SINGLE, ddp, planned, ranks, record, statuses, write

pytestmark = [pytest.mark.slow]
Sweep: TypeAlias = Callable[..., tuple[int, str, str]]  # conftest.py


def start(study: Path, results: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ddlbench.sweep", str(study), f"results_dir={results}", "--local"]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment(), start_new_session=True)


def test_a_sweep_runs_every_cell_and_then_only_what_is_missing(tmp_path: Path, sweep: Sweep, alone: None) -> None:
    """single on 2 ranks is unsupported: a row."""
    results = tmp_path / "results of mine"
    axes = {"framework": ["single", "ddp"], "gpus": [1, 2]}
    study: dict[str, Any] = {"axes": axes, "exclude": [{"framework": "ddp", "gpus": 1}]}
    code, out, err = sweep("--local", f"results_dir={results}", **study)
    assert code == 0, out + err
    expected = Counter({"single 1 ok": 1, "ddp 2 ok": 1, "single 2 unsupported": 1})
    assert statuses(results) == expected
    assert "3 cells: ok 2, unsupported 1" in out
    (missing,) = results.glob("single-*-1x-*")
    shutil.rmtree(missing)
    before = {path: path.stat().st_mtime for path in results.glob("*/attempt-*/run.json")}
    code, out, err = sweep("--local", f"results_dir={results}", **study)
    assert code == 0, err
    assert out.count("repeat 0: ") == 1
    assert statuses(results) == expected
    assert all(path.stat().st_mtime == time_ for path, time_ in before.items())


def test_a_failed_cell_is_a_row_and_runs_again_only_when_asked(tmp_path: Path, sweep: Sweep, alone: None) -> None:
    """A learning rate of 1e30 diverges."""
    results, keys = tmp_path / "results", KEYS | {"recipe.optimizer.lr": 1e30, "train.steps": 8, "train.epochs": 2}
    code, out, _ = sweep("--local", keys=keys)
    assert (code, "diverged: " in out) == (1, True), out
    for retry, attempts in (([], 1), (["--retry", "oom"], 1), (["--retry", "failed"], 2)):
        assert sweep("--local", *retry, keys=keys)[0] == 1
        assert statuses(results) == {"single 1 diverged": attempts}


def test_two_sweeps_at_once_run_each_cell_once(tmp_path: Path) -> None:
    study, results = write(tmp_path, **SINGLE, repeats=3), tmp_path / "results"
    racing = [start(study, results) for _ in range(2)]
    outputs = [process.communicate(timeout=WITHIN_S) for process in racing]
    assert [process.returncode for process in racing] == [0, 0], outputs
    assert statuses(results) == {"single 1 ok": 3}
    assert sum(out.count(": ok (") for out, _ in outputs) == 3


def test_what_another_sweep_has_tried_again_is_not_tried_once_more(tmp_path: Path, alone: None) -> None:
    cells, results, said = planned(write(tmp_path, **SINGLE)), tmp_path / "results", list[str]()
    record(results, cells[0], "error")
    state = State(results).refresh()
    record(results, cells[0], "error", attempt=2)  # by the other one, meanwhile
    run_cells(cells, state, "failed", said.append)
    assert not said
    assert statuses(results) == {"single 1 error": 2}


def test_after_a_kill_no_process_is_left_and_the_sweep_goes_on(tmp_path: Path, sweep: Sweep, alone: None) -> None:
    content = {**ddp(2), "keys": KEYS | {"train.steps": 40}, "repeats": 3}
    study, results = write(tmp_path, **content), tmp_path / "results"
    killed = start(study, results)
    wait_until(lambda: statuses(results)["ddp 2 ok"] == 1 and statuses(results)["ddp 2 running"] == 1)
    killed.kill()
    killed.communicate()
    wait_until(lambda: not ranks(results))
    assert statuses(results)["ddp 2 ok"] in (1, 2)  # the second may have ended just then
    code, _, err = sweep("--local", **content)
    assert code == 0, err
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
