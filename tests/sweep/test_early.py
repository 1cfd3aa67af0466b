"""Cells whose run ends before it has a record."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddlbench.heartbeat import Process
from ddlbench.results.reading.attempts import read_all
from ddlbench.sweep.early import record_early_end
from ddlbench.sweep.local import Began, _ended, run_cells
from ddlbench.sweep.plan import Cell, plan
from ddlbench.sweep.state import State
from ddlbench.sweep.study import load
from tests.support.killed import beat, ended_process
from tests.sweep.studies import record, write

BEGAN = "2026-01-01T10:00:00.000+00:00"


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    study = write(tmp_path, axes={"framework": ["ddp"], "gpus": [2]}, exclude=[])
    (found,) = plan(load(str(study)), torch.device("cpu"))
    return found


@pytest.mark.parametrize(
    ("codes", "said", "status", "reason"),
    [
        (
            [2, 2],
            "ddlbench: warning: w\nddlbench: no folder /x: give one\nddlbench (rank 1): no",
            "error",
            "no folder /x",
        ),
        ([6, 4], "ddlbench: unavailable: no library y\n", "unavailable", "no library y"),
        ([-signal.SIGKILL, 6], "Traceback\n", "error", "the run ended before it had a record: exit codes -9, 6"),
        ([143, 2], "ddlbench (rank 1): no folder /x on node2", "error", "no folder /x on node2"),
        ([138, 138], "", "killed", "rank 0 received SIGUSR1"),
        ([-signal.SIGUSR1, 138], "", "killed", "rank 0 received SIGUSR1"),  # while it was still importing
        ([8, 6], "ddlbench: timeout: no connection", "timeout", "no connection"),
    ],
)
def test_a_run_without_a_record_gets_a_row(
    tmp_path: Path, cell: Cell, codes: list[int], said: str, status: str, reason: str
) -> None:
    assert record_early_end(cell, tmp_path / "results", codes, BEGAN, said)
    (attempt,) = read_all([tmp_path / "results"]).attempts
    assert attempt.record["status"] == status
    assert attempt.record["reason"].startswith(reason)
    assert attempt.record["times"]["start"] == BEGAN
    assert State(tmp_path / "results").refresh().status(cell) == status
    assert [path.name for path in attempt.path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_without_a_record_is_still_to_be_run(tmp_path: Path, cell: Cell, number: int) -> None:
    assert not record_early_end(cell, tmp_path / "results", [128 + number, -number], BEGAN, "")
    assert State(tmp_path / "results").refresh().status(cell) == "missing"


def test_a_record_that_a_process_of_others_keeps_is_not_ended(tmp_path: Path, cell: Cell) -> None:
    """Somebody runs the same by hand, into the same folder; the ranks of the sweep were killed."""
    results = tmp_path / "results"
    began = Began.now(cell, State(results).refresh())
    folders = [record(results, cell, "running", attempt) for attempt in (1, 2, 3)]
    for folder, keeper in zip(folders, (Process.this(), replace(Process.this(), place="elsewhere")), strict=False):
        beat(folder, keeper, 1)
    beat(folders[2], ended_process(), 1)
    before = [(folder / "run.json").read_bytes() for folder in folders]
    assert _ended(cell, State(results).refresh(), [-signal.SIGKILL], began) == "error"
    after = [(folder / "run.json").read_bytes() for folder in folders]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, False]
    assert "exit codes -9" in json.loads(after[2])["reason"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_folder_of_data_that_does_not_exist_is_a_row_and_not_tried_again(tmp_path: Path) -> None:
    words = ["data=imagenet", "loader=native", f"data.root={tmp_path}/nowhere"]
    study = load(str(write(tmp_path, axes={"framework": ["single"]}, exclude=[])), words)
    cells, state = plan(study, torch.device("cpu")), State(tmp_path / "results").refresh()
    lines: list[str] = []
    assert run_cells(cells, state, None, lines.append) == 1
    (path,) = (tmp_path / "results").glob("*/attempt-*/run.json")
    content = json.loads(path.read_text())
    assert content["status"] == "error"
    assert f"{tmp_path}/nowhere" in content["reason"]
    assert run_cells(cells, state.refresh(), None, lines.append) == 0
    assert len(lines) == 1
