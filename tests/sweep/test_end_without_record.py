"""Cells whose run ends before it has a record."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.heartbeat import Process
from ddlbench.sweep.end_without_record import main, record_end
from ddlbench.sweep.local import _ended, run_cells
from ddlbench.sweep.plan import Cell
from ddlbench.sweep.state import State
from tests.support.killed import beat, ended_process
from tests.support.records import attempts_of
from tests.sweep.studies import SINGLE, ddp, planned, record, write

BEGAN = "2026-01-01T10:00:00.000+00:00"


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    return planned(write(tmp_path, **ddp(2)))[0]


def config(cell: Cell, folder: Path) -> Config:
    """The configuration of a run of the cell, with its results in `folder`/results."""
    return configuration(*cell.words, f"results_dir={folder}/results")


@pytest.mark.parametrize(
    ("codes", "said", "status", "reason"),
    [
        ([2, 2], "ddlbench: warning: w\nddlbench: no folder /x: why\nddlbench (rank 1): no", "error", "no folder /x"),
        ([-signal.SIGKILL, 6], "Traceback\n", "error", "the run ended before it had a record: exit codes -9, 6"),
        ([6] * 1023 + [-9], "Traceback\n", "error", "the run ended before it had a record: exit codes 6, -9"),
        ([143, 2], "ddlbench (rank 1): no folder /x on node2", "error", "no folder /x on node2"),
        ([-signal.SIGUSR1, 138], "", "killed", "rank 0 received SIGUSR1"),  # while it was still importing
        ([8, 6], "ddlbench: timeout: no connection", "timeout", "no connection"),
    ],
)
def test_a_run_without_a_record_gets_a_row(
    tmp_path: Path, cell: Cell, codes: list[int], said: str, status: str, reason: str
) -> None:
    assert record_end(config(cell, tmp_path), dict(enumerate(codes)), BEGAN, said, [2])
    (attempt,) = attempts_of(tmp_path / "results")
    assert attempt.record["status"] == status
    assert attempt.record["reason"].startswith(reason)
    assert attempt.record["times"]["start"] == BEGAN
    assert State(tmp_path / "results").refresh().status(cell) == status
    assert [path.name for path in attempt.path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_without_a_record_is_still_to_be_run(tmp_path: Path, cell: Cell, number: int) -> None:
    assert not record_end(config(cell, tmp_path), {0: 128 + number, 1: -number}, BEGAN, "", [2])
    assert State(tmp_path / "results").refresh().status(cell) == "missing"


def write_row(cell: Cell, folder: Path, code: int, began: str, said: str) -> None:
    """As run.sbatch does it after a run of the cell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO(said.encode())))
        assert main([str(code), began, *cell.words, f"results_dir={folder}/results"]) == 0


def srun_says(first: str) -> str:
    """What srun prints of two tasks where one fails and srun ends the other one."""
    return f"srun: error: node2: task 1: {first}\nsrun: error: node1: task 0: Terminated\n"


@pytest.mark.parametrize(
    ("code", "said", "status", "reason"),
    [
        (2, "ddlbench: no folder /x: give one\n", "error", "no folder /x: give one; the run ended before"),
        (143, f"ddlbench: unavailable: no y\n{srun_says('Exited with exit code 4')}", "unavailable", "no y; the run"),
        (143, srun_says("Killed"), "error", "srun: error: node2: task 1: Killed; the run"),
        (143, srun_says("Out Of Memory"), "oom", "srun: error: node2: task 1: Out Of Memory; the run"),
        (138, srun_says("User defined signal 1"), "killed", "rank 1 received SIGUSR1"),
        (143, srun_says("Exited with exit code 138"), "killed", "rank 1 received SIGUSR1"),
        (143, srun_says("Segmentation fault (core dumped)"), "error", "srun: error: node2: task 1: Segmentation"),
        (143, srun_says("Exited with exit code 6"), "missing", ""),
        (143, srun_says("Terminated"), "missing", ""),
        (143, "", "missing", ""),
    ],
)
def test_a_job_writes_the_row_of_its_run_once(
    tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch, code: int, said: str, status: str, reason: str
) -> None:
    """Two ranks on two nodes. srun's exit code is the largest one; the rank that failed first decides."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "1(x2)"}.items():
        monkeypatch.setenv(name, value)
    results = tmp_path / "results"
    write_row(cell, tmp_path, code, BEGAN, said)
    state = State(results).refresh()
    assert state.status(cell) == status
    if status == "missing":
        return
    ((attempt,), (read,)) = state.of(cell), attempts_of(results)
    assert attempt.reason.startswith(reason)
    assert attempt.ended_by == ("time_limit" if status == "killed" else None)
    assert (attempt.job, read.record["launch"]) == ("7", {"world_size": 2, "nodes": 2, "ranks_per_node": 1})
    write_row(cell, tmp_path, code, BEGAN, said)
    assert len(State(results).refresh().of(cell)) == 1
    write_row(cell, tmp_path, code, BEGAN.replace("T10", "T11"), said)  # Slurm has started it again
    assert len(State(results).refresh().of(cell)) == 2


def test_the_row_of_an_earlier_run_is_not_that_of_this_one(
    tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of 10:00 left a record; that of 11:00 ended with no record."""
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
    record(tmp_path / "results", cell, "oom", attempt=0)
    write_row(cell, tmp_path, 2, BEGAN.replace("T10", "T11"), "")
    assert [attempt.status for attempt in State(tmp_path / "results").refresh().of(cell)] == ["oom", "error"]


def test_a_record_that_a_process_of_others_keeps_is_not_ended(tmp_path: Path, cell: Cell) -> None:
    """Somebody runs the same by hand, into the same folder; the ranks of the sweep were killed."""
    results = tmp_path / "results"
    folders = [record(results, cell, "running", attempt) for attempt in (1, 2, 3)]
    for folder, keeper in zip(folders, (Process.this(), replace(Process.this(), place="elsewhere")), strict=False):
        beat(folder, keeper, 1)
    beat(folders[2], ended_process(), 1)
    before = [(folder / "run.json").read_bytes() for folder in folders]
    assert _ended(cell, State(results).refresh(), [-signal.SIGKILL], BEGAN, "") == "error"
    after = [(folder / "run.json").read_bytes() for folder in folders]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, False]
    assert "exit codes -9" in json.loads(after[2])["reason"]


@pytest.mark.slow
def test_a_folder_of_data_that_does_not_exist_is_a_row_and_not_tried_again(tmp_path: Path) -> None:
    words = ["data=imagenet", "loader=native", f"data.root={tmp_path}/nowhere"]
    cells, state = planned(write(tmp_path, **SINGLE), *words), State(tmp_path / "results").refresh()
    lines: list[str] = []
    run_cells(cells, state, None, lines.append)
    (path,) = (tmp_path / "results").glob("*/attempt-*/run.json")
    content = json.loads(path.read_text())
    assert content["status"] == "error"
    assert f"{tmp_path}/nowhere" in content["reason"]
    run_cells(cells, state.refresh(), None, lines.append)
    assert sum(line.startswith("[1/1]") for line in lines) == 1  # it may also say that it waits for another sweep
