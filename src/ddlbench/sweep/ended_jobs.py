"""Cells whose Slurm job ended without a record of them: their rows, from the output of the job and from what Slurm says
of its end."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddlbench.errors import RunError
from ddlbench.sweep.early import INTERRUPTS, STATUSES, first_failure, lines, write_row
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
BY_SIGNAL = {"Killed": KILLED, "Terminated": 128 + signal.SIGTERM, "Out": 7}  # of memory, as early.py calls it
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


@dataclass(frozen=True)
class Job:
    """A job that has begun: its number and its output."""

    number: str
    log: Path

    @property
    def last_output(self) -> str:
        """When, as the times of a record are written."""
        return datetime.fromtimestamp(self.log.stat().st_mtime, UTC).isoformat(timespec="milliseconds")

    def output(self) -> str:
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
    found = [(cell, job) for cell, job in _jobs(cells, state) if not _recorded(cell, state, job)]
    if not found:
        return
    queued = queue()
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


def _jobs(cells: Sequence[Cell], state: State) -> list[tuple[Cell, Job]]:
    """The job that claimed each cell last, where it has begun and the cell has not ended well."""
    paths = sorted((state.results / FOLDER / "logs").glob("ddlbench-*.out"))
    logs: dict[str, Path] = {path.stem.rpartition("-")[0]: path for path in paths}
    names = ((cell, last_job(state.results, cell.key)) for cell in cells if logs and state.status(cell) not in FINAL)
    return [(cell, Job(logs[name].stem.rpartition("-")[2], logs[name])) for cell, name in names if name in logs]


def _recorded(cell: Cell, state: State, job: Job) -> bool:
    """Whether the job has left a record of the cell. One that names no job may be its record."""
    return any(one.job in (None, job.number) for one in state.of(cell))


def _write_row(cell: Cell, results: Path, job: Job) -> None:
    found = part(job.output(), cell.words)
    ended = None if found is None else end_of(found, slurm_state(job.number) if found.last else FORGOTTEN, job)
    if found is None or ended is None:
        return
    nodes = found.nodes
    sections: dict[str, Any] = {
        "launch": {"world_size": cell.gpus, "nodes": nodes, "ranks_per_node": nodes and cell.gpus // nodes},
        "environment": {"variables": {JOB_VARIABLE: job.number}},
    }
    write_row(cell, results, *ended, found.began or job.last_output, job.last_output, **sections)


def part(output: str, words: Sequence[str]) -> Part | None:
    """What the output has of the run with these words, all of it where the job ended before its first run; None where
    the job did not reach this one."""
    begins = list(BEGINS.finditer(output))
    if not begins:
        return Part(output)
    for number, match in enumerate(begins):
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


def end_of(found: Part, state: str, job: Job) -> tuple[str, str] | None:
    """Status and reason; None for an interruption. A signal that ended the run may be Slurm's: then the job's state
    says more."""
    code, itself = found.code, state in (*ENDED_ITSELF, FORGOTTEN)
    said = lines(found.said)[:1] or OF_SLURM.findall(found.said)[:1]
    from_outside = code is None or code in (*INTERRUPTS, KILLED)
    how = f"its state is {state}" if code is None or (from_outside and not itself) else _exit(code)
    reason = "; ".join([*said, f"Slurm job {job.number} ended before the run had a record: {how}; see {job.log.name}"])
    if from_outside and not itself:
        return (ENDED[state], reason) if state in ENDED else None
    if code is not None:
        return None if code in (0, *INTERRUPTS) else (STATUSES.get(code, "error"), reason)
    if found.nodes is None:
        return ("error", reason) if said else None
    return "killed", reason


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
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            if (match := re.search(pattern, done.stdout)) is not None:
                return match[1]
    return FORGOTTEN


def _time(text: str) -> str | None:
    try:
        return datetime.fromisoformat(text).isoformat(timespec="milliseconds")
    except ValueError:
        return None
