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
    """A job that has begun: its number and its output. Of one that ended without output: its state, and the seconds
    since 1970 of its end, both from Slurm."""

    number: str
    log: Path | None
    state: str | None = None
    end_s: float = 0.0

    @property
    def ended(self) -> str:
        """When its last output came, else its end, as the times of a record are written."""
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
    """What a job's output has of one of its runs.

    began, nodes: None where the job ended before its first run
    code: None where the run did not end before the job
    last: whether the job began no other run after it
    """

    said: str
    began: str | None = None
    nodes: int | None = None
    code: int | None = None
    last: bool = True


def record_ended_jobs(cells: Sequence[Cell], state: State, queue: Callable[[], Callable[[str], bool]]) -> None:
    """Write a row for each cell whose Slurm job has ended and has left no record of it; once, whichever sweep comes
    first. A cell that was interrupted, or that its job did not reach, gets none: it is still to be run.

    queue: asks Slurm which jobs wait or run; only where there is such a cell
    """
    claimed, logs = _claimed(cells, state), _logs(state.results)
    found = [(cell, job) for cell, name in claimed if (job := logs.get(name)) and not _recorded(cell, state, job)]
    silent = [(cell, name) for cell, name in claimed if name not in logs]
    if not found and not silent:
        return
    queued = queue()
    known = jobs_without_output() if any(not queued(name) for _, name in silent) else {}
    found += [(cell, job) for cell, name in silent if (job := known.get(name)) and not _recorded(cell, state, job)]
    held: list[tuple[Cell, Job, Claim]] = []
    for cell, job in found:
        with contextlib.suppress(OSError):  # this user cannot write there: another sweep will
            if (one := claim(state.results, cell.key, queued=queued)) is not None:
                held.append((cell, job, one))
    if not held:
        return
    state.refresh()  # the record may have come since
    for cell, job, one in held:
        with contextlib.suppress(OSError, RunError):
            if not _recorded(cell, state, job):
                _write_row(cell, state.results, job)
        one.release()
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
    """Whether the job has left a record of the cell, of the last time that it began it: Slurm may have started the job
    again. One that names no job may be its record."""
    starts = [one.start for one in state.of(cell) if one.job in (None, job.number)]
    if not starts:
        return False
    found = part(job.output(), cell.words)
    return found is None or found.began is None or found.began <= max(starts)


def _write_row(cell: Cell, results: Path, job: Job) -> None:
    found = part(job.output(), cell.words)
    state = job.state or (slurm_state(job.number) if found and found.last else FORGOTTEN)
    ended = None if found is None else end_of(found, state, job)
    if found is None or ended is None:
        return
    nodes = found.nodes
    sections: dict[str, Any] = {
        "launch": {"world_size": cell.gpus, "nodes": nodes, "ranks_per_node": nodes and cell.gpus // nodes},
        "environment": {"variables": {JOB_VARIABLE: job.number}},
    }
    write_row(cell, results, *ended, found.began or job.ended, job.ended, **sections)


def part(output: str, words: Sequence[str]) -> Part | None:
    """What the output has of the run with these words, the last time that the job began it; all of it where the job
    ended before its first run; None where the job did not reach this one."""
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


def end_of(found: Part, state: str, job: Job) -> tuple[str, str | None, str] | None:
    """Status, what ended it, and reason; None for an interruption. A signal that ended the run may be Slurm's: then the
    job's state says more."""
    code, itself = found.code, state in (*ENDED_ITSELF, FORGOTTEN)
    said = lines(found.said)[:1] or OF_SLURM.findall(found.said)[:1]
    from_outside = code is None or code in (*INTERRUPTS, KILLED)
    how = f"its state is {state}" if code is None or (from_outside and not itself) else _exit(code)
    see = f"see {job.log.name}" if job.log else "it has left no output"
    reason = "; ".join([*said, f"Slurm job {job.number} ended before the run had a record: {how}; {see}"])
    if from_outside and not itself:
        return (ENDED[state], None, reason) if state in ENDED else None
    if code is not None:
        return None if code in (0, *INTERRUPTS) else (*ended_with(code), reason)
    if found.nodes is None:
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
    """This user's jobs that ended some minutes ago, by name: their output would be visible by now. From the controller,
    and from the accounting where there is one."""
    shown = re.compile(r"JobId=(\d+) .*?JobName=(\S+) .*?\bJobState=([A-Z_]+) .*?\bEndTime=(\d+) ")
    lists = ["-X", "-n", "-P", f"--starttime={SINCE}", "-o", "JobIDRaw,JobName,State,End"]
    counted = re.compile(r"^(\d+)\|(.*)\|([A-Z_]+)[^|]*\|(\d+)$", re.MULTILINE)
    listed = [*shown.finditer(_said(["scontrol", "-o", "show", "job"])), *counted.finditer(_said(["sacct", *lists]))]
    ended = ((match[2], Job(match[1], None, match[3], float(match[4]))) for match in listed)
    return {name: job for name, job in ended if job.end_s < time.time() - SILENT_S}


def _said(command: Sequence[str]) -> str:
    """What a command of Slurm prints; nothing where it fails."""
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
