"""Cells whose Slurm job ended without a record of them: their rows, from the output of the job and from what Slurm says
of its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddlbench.errors import STATUSES, RunError
from ddlbench.heartbeat import SILENT_S
from ddlbench.sweep.early import INTERRUPTS, ended_with, first_failure, lines, write_row
from ddlbench.sweep.lock import FOLDER, Claim, claim, last_job
from ddlbench.sweep.plan import Cell
from ddlbench.sweep.state import FINAL, JOB_VARIABLE, State

LOG_BYTES = 2**25  # of the end of a job's output
# Lines of scripts/slurm/run.sbatch around each run.
BEGINS = re.compile(r"^run\.sbatch: (\S+) (\d+) nodes: (.*)$", re.MULTILINE)
ENDS = re.compile(r"^run\.sbatch: exit code (\d+)$", re.MULTILINE)
# srun's own exit code is the largest of all tasks, also of those that it ended itself: the first task counts.
TASK = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: (?:Exited with exit code (\d+)|(\w+))", re.MULTILINE)
KILLED = 128 + signal.SIGKILL
# The first word of what srun says: "Out Of Memory", as early.py calls it; "User defined signal 1" of a task that was
# still importing at the time limit.
BY_SIGNAL = {
    "Killed": KILLED,
    "Terminated": 128 + signal.SIGTERM,
    "Out": STATUSES["oom"].exit_code,
    "User": 128 + signal.SIGUSR1,
}
OF_SLURM = re.compile(r"^(?:run\.sbatch|srun: error|slurmstepd: error): .+$", re.MULTILINE)
# Slurm's states of a job that it has ended (squeue(1), "JOB STATE CODES"), and the status of the run in it.
ENDED = {
    "BOOT_FAIL": "error",
    "DEADLINE": "timeout",
    "NODE_FAIL": "error",
    "OUT_OF_MEMORY": "oom",
    "TIMEOUT": "timeout",
}
ENDED_ITSELF = ("COMPLETED", "FAILED")
FORGOTTEN = "no longer known"
SINCE = "now-30days"  # how far the accounting is read back for jobs without output
TIMES = {"SLURM_TIME_FORMAT": "%s"}  # seconds since 1970


@dataclass(frozen=True)
class Job:
    """A job that has begun: its number and its output. If it ended without output, its state and its end, in seconds
    since 1970, come from Slurm."""

    number: str
    log: Path | None
    state: str | None = None
    end_s: float = 0.0

    @property
    def ended(self) -> str:
        """The time of its last output, else of its end, in the format of a record's times."""
        when = self.log.stat().st_mtime if self.log else self.end_s
        return datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")

    def output(self) -> str:
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_BYTES))
            return file.read(LOG_BYTES).decode(errors="replace")


@dataclass(frozen=True)
class Part:
    """The part of a job's output that belongs to one of its runs.

    began, nodes: None if the job ended before its first run
    code: None if the run did not end before the job
    last: whether the job began no other run after it
    """

    said: str
    began: str | None = None
    nodes: int | None = None
    code: int | None = None
    last: bool = True


def record_ended_jobs(cells: Sequence[Cell], state: State, queue: Callable[[], Callable[[str], bool]]) -> None:
    """Write a row for each cell whose Slurm job has ended without a record of it; the first sweep to come writes it. A
    cell that was interrupted, or that its job did not reach, gets no row and runs again.

    queue: asks Slurm which jobs wait or run; called only if there is such a cell
    """
    claimed, logs = _claimed(cells, state), _logs(state.results)
    ended = [(cell, job) for cell, name in claimed if (job := logs.get(name)) and not _recorded(cell, state, job)]
    silent = [(cell, name) for cell, name in claimed if name not in logs]
    if not ended and not silent:
        return
    queued = queue()
    without_output = jobs_without_output() if any(not queued(name) for _, name in silent) else {}
    ended += [
        (cell, job) for cell, name in silent if (job := without_output.get(name)) and not _recorded(cell, state, job)
    ]
    held: list[tuple[Cell, Job, Claim]] = []
    for cell, job in ended:
        with contextlib.suppress(OSError):  # this user cannot write there: another sweep will
            if (taken := claim(state.results, cell.key, queued=queued)) is not None:
                held.append((cell, job, taken))
    if not held:
        return
    state.refresh()  # the record may have come since
    for cell, job, taken in held:
        with contextlib.suppress(OSError, RunError):
            if not _recorded(cell, state, job):
                _write_row(cell, state.results, job)
        taken.release()
    state.refresh()


def _claimed(cells: Sequence[Cell], state: State) -> list[tuple[Cell, str]]:
    """The name of the job that claimed each cell last, where the cell has not ended well."""
    names = ((cell, last_job(state.results, cell.key)) for cell in cells if state.status(cell) not in FINAL)
    return [(cell, name) for cell, name in names if name is not None]


def _logs(results: Path) -> dict[str, Job]:
    """The jobs that have begun, by name."""
    paths = sorted((results / FOLDER / "logs").glob("ddlbench-*.out"))
    return {path.stem.rpartition("-")[0]: Job(path.stem.rpartition("-")[2], path) for path in paths}


def _recorded(cell: Cell, state: State, job: Job) -> bool:
    """Whether the job has left a record of the cell since it last began it: Slurm may have started the job again. A
    record that names no job may be the job's."""
    starts = [attempt.start for attempt in state.of(cell) if attempt.job in (None, job.number)]
    if not starts:
        return False
    output = part(job.output(), cell.words)
    return output is None or output.began is None or output.began <= max(starts)


def _write_row(cell: Cell, results: Path, job: Job) -> None:
    output = part(job.output(), cell.words)
    state = job.state or (slurm_state(job.number) if output and output.last else FORGOTTEN)
    end = None if output is None else end_of(output, state, job)
    if output is None or end is None:
        return
    nodes = output.nodes
    sections: dict[str, Any] = {
        "launch": {"world_size": cell.gpus, "nodes": nodes, "ranks_per_node": nodes and cell.gpus // nodes},
        "environment": {"variables": {JOB_VARIABLE: job.number}},
    }
    write_row(cell, results, *end, output.began or job.ended, job.ended, **sections)


def part(output: str, words: Sequence[str]) -> Part | None:
    """The output of the last run with these words; all of the output if the job ended before its first run; None if the
    job did not reach this run."""
    begins = list(BEGINS.finditer(output))
    if not begins:
        return Part(output)
    for number, match in reversed(list(enumerate(begins))):
        if match[3].startswith(" ".join(words) + " "):
            last = number + 1 == len(begins)
            said = output[match.end() : None if last else begins[number + 1].start()]
            return Part(said, _time(match[1]), int(match[2]), _code(said), last)
    return None


def _code(said: str) -> int | None:
    """The exit code of the task that failed first, else that of srun."""
    ended = ENDS.search(said)
    if ended is None:
        return None
    codes = (int(match[1]) if match[1] else BY_SIGNAL.get(match[2], 1) for match in TASK.finditer(said))
    return first_failure(codes) or int(ended[1])


def end_of(output: Part, state: str, job: Job) -> tuple[str, str | None, str] | None:
    """Status, what ended it, and reason; None for an interruption. A signal that ended the run may have come from
    Slurm: then the job's state decides."""
    code, itself = output.code, state in (*ENDED_ITSELF, FORGOTTEN)
    said = lines(output.said)[:1] or OF_SLURM.findall(output.said)[:1]
    from_outside = code is None or code in (*INTERRUPTS, KILLED)
    how = f"its state is {state}" if code is None or (from_outside and not itself) else _exit(code)
    see = f"see {job.log.name}" if job.log else "it has left no output"
    reason = "; ".join([*said, f"Slurm job {job.number} ended before the run had a record: {how}; {see}"])
    if from_outside and not itself:
        return (ENDED[state], None, reason) if state in ENDED else None
    if code is not None:
        return None if code in (0, *INTERRUPTS) else (*ended_with(code), reason)
    if output.nodes is None:
        return ("error", None, reason) if said or state == "FAILED" else None
    return "killed", None, reason


def _exit(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


def slurm_state(number: str) -> str:
    """TIMEOUT, NODE_FAIL, ...: from the accounting, else from the controller, which knows a job for some minutes."""
    for command, pattern in (
        (["sacct", "-X", "-n", "-P", "-j", number, "-o", "State"], r"^([A-Z_]+)"),
        (["scontrol", "-o", "show", "job", number], r"\bJobState=([A-Z_]+)"),
    ):
        if (match := re.search(pattern, _said(command))) is not None:
            return match[1]
    return FORGOTTEN


def jobs_without_output() -> Mapping[str, Job]:
    """This user's jobs that ended some minutes ago, by name. Their output would be visible by now. They are listed by
    the controller, and by the accounting if there is one."""
    shown = re.compile(r"JobId=(\d+) .*?JobName=(\S+) .*?\bJobState=([A-Z_]+) .*?\bEndTime=(\d+) ")
    lists = ["-X", "-n", "-P", f"--starttime={SINCE}", "-o", "JobIDRaw,JobName,State,End"]
    counted = re.compile(r"^(\d+)\|(.*)\|([A-Z_]+)[^|]*\|(\d+)$", re.MULTILINE)
    listed = [*shown.finditer(_said(["scontrol", "-o", "show", "job"])), *counted.finditer(_said(["sacct", *lists]))]
    ended = ((match[2], Job(match[1], None, match[3], float(match[4]))) for match in listed)
    return {name: job for name, job in ended if job.end_s < time.time() - SILENT_S}


def _said(command: Sequence[str]) -> str:
    """The output of a Slurm command; empty if it fails."""
    try:
        environment = {**os.environ, **TIMES}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _time(text: str) -> str | None:
    try:
        return datetime.fromisoformat(text).isoformat(timespec="milliseconds")
    except ValueError:
        return None
