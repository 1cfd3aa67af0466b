"""Cells whose Slurm job ended without a record of them. The output is that of scripts/slurm/run.sbatch; squeue, sacct
and scontrol are stand-ins that say what the test wants. tests/slurm/test_sweep.py does it with a real Slurm."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from ddlbench.results.reading.attempts import read_all
from ddlbench.sweep.__main__ import main
from ddlbench.sweep.ended_jobs import Job, Part, end_of, part, record_ended_jobs, slurm_state
from ddlbench.sweep.lock import claim
from ddlbench.sweep.plan import Cell, plan
from ddlbench.sweep.state import State
from ddlbench.sweep.study import load
from tests.sweep.studies import record, write

NAME = "ddlbench-tiny-0123456789ab"
BEGAN = "2026-01-01T12:00:00+00:00"


def began(cell: Cell, nodes: int = 2) -> str:
    return f'run.sbatch: {BEGAN} {nodes} nodes: {" ".join(cell.words)} results_dir="r" progress=false\n'


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    """Three repeats of one configuration: cells of one job."""
    study = write(tmp_path, axes={"framework": ["ddp"], "gpus": [2]}, exclude=[], repeats=3)
    return plan(load(str(study)), torch.device("cpu"))


def end_job(results: Path, cells: list[Cell], output: str, number: int = 7) -> Path:
    """What a job of these cells leaves."""
    for cell in cells:
        assert claim(results, cell.key, NAME, queued=lambda _: False)
    log = results / ".sweep" / "logs" / f"{NAME}-{number}.out"
    log.parent.mkdir(exist_ok=True)
    log.write_text(output)
    when = 1767269200  # 2026-01-01 12:06:40 UTC
    os.utime(log, (when, when))
    for path in (results / ".sweep").glob("*.*"):
        if path.is_file():  # the sweep that submitted has ended: its process number is another one's
            path.write_text(json.dumps(json.loads(path.read_text()) | {"started": -1}))
    return log


def slurm_says(folder: Path, monkeypatch: pytest.MonkeyPatch, **said: str) -> None:
    """Commands of Slurm that print this; the others are not installed."""
    folder.mkdir()
    for name, text in said.items():
        (folder / name).write_text(f"#!/bin/bash\necho '{text}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if said else str(folder))


def settle(results: Path, cells: list[Cell]) -> State:
    state = State(results).refresh()
    record_ended_jobs(cells, state, lambda: lambda _: False)
    return state


def test_a_run_that_left_no_record_is_a_row_once(
    tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says(tmp_path / "bin", monkeypatch, squeue="", scontrol="JobId=7 JobState=FAILED ExitCode=2:0")
    results, cell = tmp_path / "results", cells[0]
    end_job(results, [cell], f"{began(cell)}ddlbench: no folder /x: give one\nrun.sbatch: exit code 2\n")
    state = settle(results, cells)
    assert [state.status(each) for each in cells] == ["error", "missing", "missing"]
    (attempt,) = read_all([results]).attempts
    assert attempt.record["reason"] == (
        f"no folder /x: give one; Slurm job 7 ended before the run had a record: exit code 2; see {NAME}-7.out"
    )
    assert attempt.record["times"] == {"start": "2026-01-01T12:00:00.000+00:00", "end": "2026-01-01T12:06:40.000+00:00"}
    assert attempt.record["launch"] == {"world_size": 2, "nodes": 2, "ranks_per_node": 1}
    assert [path.name for path in attempt.path.iterdir()] == ["run.json"]
    assert settle(results, cells).attempts.keys() == state.attempts.keys()


def test_what_others_hold_or_have_recorded_stays_as_it_is(tmp_path: Path, cells: list[Cell]) -> None:
    """A job that still runs; a record of this job; another sweep that looks at the end just now."""
    results = tmp_path / "results"
    end_job(results, cells, "".join(f"{began(cell)}run.sbatch: exit code 2\n" for cell in cells))
    running = State(results).refresh()
    record_ended_jobs(cells, running, lambda: lambda name: name == NAME)
    assert not running.attempts
    record(results, cells[0], "error", 3, environment={"variables": {"SLURM_JOB_ID": "7"}})  # at 13:00, after BEGAN
    other = claim(results, cells[1].key, queued=lambda _: False)
    state = settle(results, cells)
    assert other is not None
    assert [len(state.of(cell)) for cell in cells] == [1, 0, 1]


def test_a_job_that_retries_a_failed_cell_and_leaves_no_record_is_another_row(
    tmp_path: Path, cells: list[Cell]
) -> None:
    results, cell = tmp_path / "results", cells[0]
    record(results, cell, "oom", environment={"variables": {"SLURM_JOB_ID": "3"}})
    end_job(results, [cell], f"{began(cell)}run.sbatch: exit code 2\n")
    assert [one.status for one in settle(results, cells).of(cell)] == ["oom", "error"]


def test_a_second_start_of_a_job_that_leaves_no_record_is_a_row_of_its_own(tmp_path: Path, cells: list[Cell]) -> None:
    """Of two cells the first start left records, at 11:00; the second one began one of them again, at 12:00."""
    results, (first, second, _) = tmp_path / "results", cells
    for cell in (first, second):
        record(results, cell, "error", environment={"variables": {"SLURM_JOB_ID": "7"}})
    earlier = began(second).replace("T12", "T10")
    end_job(results, [first, second], f"{earlier}{began(first)}ddlbench: no folder /x\nrun.sbatch: exit code 2\n")
    state = settle(results, cells)
    assert [len(state.of(cell)) for cell in cells] == [2, 1, 0]
    assert state.of(first)[-1].reason.startswith("no folder /x; Slurm job 7 ended before the run had a record")
    assert settle(results, cells).attempts.keys() == state.attempts.keys()


def test_a_cell_is_not_submitted_again_until_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_says(tmp_path / "bin", monkeypatch, squeue="", sbatch="8", scontrol="JobState=FAILED")
    study = write(tmp_path, axes={"framework": ["single"]}, exclude=[])
    (cell,) = plan(load(str(study)), torch.device("cpu"))
    results = tmp_path / "results"
    end_job(results, [cell], f"{began(cell, nodes=1)}run.sbatch: exit code 2\n")
    words = [str(study), f"results_dir={results}"]
    assert main([*words, "--status"]) == 0
    assert capsys.readouterr().out.startswith("1 cells: error\n")
    assert main([*words, "--slurm"]) == 0
    assert capsys.readouterr().out == "nothing to submit\n"
    assert main([*words, "--slurm", "--retry", "failed"]) == 0
    assert capsys.readouterr().out.startswith("job 8: ")


def test_the_output_of_a_job_is_divided_by_its_runs(cells: list[Cell]) -> None:
    first, second, third = cells
    output = f"{began(first)}A\nrun.sbatch: exit code 2\n{began(second, nodes=4)}B\n"
    when = "2026-01-01T12:00:00.000+00:00"
    assert part(output, first.words) == Part("\nA\nrun.sbatch: exit code 2\n", when, 2, 2, last=False)
    assert part(output, second.words) == Part("\nB\n", when, 4, None, last=True)
    assert part(output, third.words) is None
    refused = "run.sbatch: no python here\n"
    assert part(refused, third.words) == Part(refused)


def test_of_a_job_that_was_started_again_the_last_start_counts(cells: list[Cell]) -> None:
    """Its output is appended."""
    first, second, _ = cells
    output = f"{began(first)}A\n{began(second)}B\n{began(first, nodes=4)}C\nrun.sbatch: exit code 2\n"
    found = part(output, first.words)
    assert found is not None
    assert (found.said, found.nodes, found.code, found.last) == ("\nC\nrun.sbatch: exit code 2\n", 4, 2, True)


def of_srun(first: str, code: int) -> str:
    """What srun says of two tasks where one fails and it ends the other."""
    return (
        f"srun: error: node2: task 1: {first}\nsrun: error: node1: task 0: Terminated\nrun.sbatch: exit code {code}\n"
    )


@pytest.mark.parametrize(
    ("first", "code", "expected"),
    [
        ("Exited with exit code 2", 143, 2),
        ("Killed", 143, 137),
        ("Out Of Memory", 143, 7),
        ("User defined signal 1", 138, 138),
        ("Segmentation fault (core dumped)", 143, 1),
        ("Exited with exit code 6", 143, 143),
        ("Terminated", 143, 143),
        ("Exited with exit code 138", 143, 138),
    ],
)
def test_the_task_that_failed_first_counts(cells: list[Cell], first: str, code: int, expected: int) -> None:
    """As a real srun says it: its own exit code is that of the task which it terminated."""
    found = part(began(cells[0]) + of_srun(first, code), cells[0].words)
    assert found is not None
    assert found.code == expected
    cut = part(began(cells[0]) + of_srun(first, code).partition("run.sbatch")[0], cells[0].words)
    assert cut is not None
    assert cut.code is None


def shown(name: str, number: int, state: str, ended: float) -> str:
    """As `scontrol -o show job` says it under Slurm 22.05, with SLURM_TIME_FORMAT=%s."""
    return (
        f"JobId={number} JobName={name} UserId=root(0) JobState={state} Reason=None Requeue=0 Restarts=0 ExitCode=0:53 "
        f"SubmitTime=1795352400 EligibleTime=1795352400 StartTime=1795352401 EndTime={ended:.0f} Deadline=N/A "
    )


def counted(name: str, number: int, state: str, ended: float) -> str:
    """As `sacct -X -n -P -o JobIDRaw,JobName,State,End` says it."""
    return f"{number}|{name}|{state}|{ended:.0f}"


@pytest.mark.parametrize(("command", "line"), [("scontrol", shown), ("sacct", counted)])
@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("FAILED", "error"),
        ("NODE_FAIL", "error"),
        ("TIMEOUT", "timeout"),
        ("CANCELLED", "missing"),
        ("COMPLETED", "missing"),
    ],
)
def test_a_job_that_ended_without_any_output_is_a_row_where_slurm_says_so(
    tmp_path: Path,
    cells: list[Cell],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    line: Any,
    state: str,
    expected: str,
) -> None:
    """The second cell's job is known to nobody."""
    results, ended = tmp_path / "results", time.time() - 600
    end_job(results, cells[:1], "").unlink()
    says = {command: "\n".join([line("other job", 6, "FAILED", ended), line(NAME, 7, state, ended)])}
    slurm_says(tmp_path / "bin", monkeypatch, **says)
    assert settle(results, cells).status(cells[0]) == expected
    if expected != "missing":
        (attempt,) = read_all([results]).attempts
        reason = f"Slurm job 7 ended before the run had a record: its state is {state}; it has left no output"
        assert attempt.record["reason"] == reason
        times = [datetime.fromisoformat(attempt.record["times"][name]).timestamp() for name in ("start", "end")]
        assert times == [pytest.approx(ended, abs=1)] * 2
    assert len(settle(results, cells).attempts) == (expected != "missing")


def test_a_job_that_has_just_ended_may_still_have_output(
    tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared file system shows it later on another node."""
    results = tmp_path / "results"
    end_job(results, cells[:1], "").unlink()
    slurm_says(tmp_path / "bin", monkeypatch, scontrol=shown(NAME, 7, "FAILED", time.time() - 5))
    assert settle(results, cells).status(cells[0]) == "missing"


def begun(said: str = "", code: int | None = None) -> Part:
    return Part(said, BEGAN, 2, code)


@pytest.mark.parametrize(
    ("found", "state", "status", "reason"),
    [
        (begun("ddlbench: unavailable: no y\n", 4), "FAILED", "unavailable", "no y; Slurm job 7 ended"),
        (begun(code=138), "FAILED", "killed", "exit code 138 (SIGUSR1)"),
        (
            begun("srun: error: node2: task 1: Killed\n", 137),
            "FAILED",
            "error",
            "srun: error: node2: task",
        ),
        (begun(code=143), "TIMEOUT", "timeout", "its state is TIMEOUT"),
        (begun(), "NODE_FAIL", "error", "its state is NODE_FAIL"),
        (begun(), "OUT_OF_MEMORY", "oom", "its state is OUT_OF_MEMORY"),
        (begun(), "no longer known", "killed", "its state is no longer known"),
        (Part("run.sbatch: no python here\n"), "FAILED", "error", "run.sbatch: no python here; Slurm job 7 ended"),
        (Part(""), "FAILED", "error", "its state is FAILED"),
    ],
)
def test_the_status_follows_from_exit_code_and_slurm(found: Part, state: str, status: str, reason: str) -> None:
    ended = end_of(found, state, Job("7", Path("7.out")))
    assert ended is not None
    assert ended[0] == status
    assert ended[1] == ("time_limit" if found.code == 138 else None)
    assert reason in ended[2]


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (begun(code=0), "COMPLETED"),
        (begun(code=143), "CANCELLED"),
        (begun(code=143), "FAILED"),
        (begun(code=137), "CANCELLED"),
        (begun(), "CANCELLED"),
        (begun(), "PREEMPTED"),
        (Part(""), "no longer known"),
    ],
)
def test_an_interrupted_run_is_still_to_be_run(found: Part, state: str) -> None:
    assert end_of(found, state, Job("7", Path("7.out"))) is None


def test_the_accounting_is_asked_first_then_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = "JobId=7 JobName=x JobState=NODE_FAIL Reason=None"
    slurm_says(tmp_path / "both", monkeypatch, sacct="CANCELLED by 1000", scontrol=controller)
    assert slurm_state("7") == "CANCELLED"
    slurm_says(tmp_path / "one", monkeypatch, sacct="", scontrol=controller)
    assert slurm_state("7") == "NODE_FAIL"
    slurm_says(tmp_path / "none", monkeypatch)
    assert slurm_state("7") == "no longer known"
