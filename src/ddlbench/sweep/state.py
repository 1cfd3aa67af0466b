"""The state of a study, read from the records in its results folder: no other state is kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, cast

from ddlbench.config.keys import Options, added_later, measured_part
from ddlbench.errors import STATUSES, TIME_LIMIT
from ddlbench.foreign import Object, parse, read_bytes
from ddlbench.heartbeat import server_time
from ddlbench.record.files import end_for_rank_0
from ddlbench.results.reading.killed import find_killed
from ddlbench.results.rows import group_by, section
from ddlbench.sweep.plan import Cell, key_of

MISSING, RUNNING = "missing", "running"
FINAL = ("ok", "unsupported")
JOB_VARIABLE, RESTARTS_VARIABLE = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"  # in a record's section `environment`
RETRIES = {
    choice: tuple(name for name, status in STATUSES.items() if choice in status.retry)
    for choice in ("failed", "oom", "all")
}


@dataclass(frozen=True)
class Attempt:
    """The part of a record that the sweep needs."""

    folder: Path
    key: str
    status: str
    reason: str
    start: str
    seconds: float | None  # wall time; None while it runs
    gpus: int
    saved: bool = False  # whether it has left a checkpoint
    resumed: bool = False  # whether it has continued another one
    job: str | None = None  # number of its Slurm job
    restarts: str = "0"  # how often Slurm had put that job back into the queue
    ended_by: str | None = None  # as errors.py; None also in records of versions without this field

    @property
    def interrupted(self) -> bool:
        """Whether the attempt was interrupted without a result of its own, so that its cell may run again. A time limit
        would end it again, unless the run has saved a checkpoint."""
        return self.saved if self.ended_by == TIME_LIMIT else self.status == "killed"


@dataclass
class State:
    """The attempts below a results folder. `refresh` reads only what is new or has not ended."""

    results: Path
    attempts: dict[Path, Attempt] = field(default_factory=dict[Path, Attempt])
    unreadable: set[Path] = field(default_factory=set[Path])

    def refresh(self) -> State:
        for folder in sorted(self.results.glob("[!.]*/attempt-*")):
            recorded = self.attempts.get(folder)
            if recorded is None or recorded.status == RUNNING:
                self._read(folder)
        ordered = sorted(self.attempts.values(), key=lambda attempt: attempt.start)
        self._by_key = group_by(ordered, lambda attempt: attempt.key)
        return self

    def status(self, cell: Cell) -> str:
        """The status of an attempt that ended with `ok`, else of the last one; "missing" if there is none, or if the
        last one was interrupted without a result or can continue."""
        attempts = self.of(cell)
        if not attempts:
            return MISSING
        last = next((attempt for attempt in attempts if attempt.status == "ok"), attempts[-1])
        return MISSING if last.interrupted else last.status

    def of(self, cell: Cell) -> list[Attempt]:
        """The attempts at a cell, in order of their start."""
        return self._by_key.get(cell.key, [])

    def estimate(self, cells: Iterable[Cell]) -> float | None:
        """Seconds of one run, from the complete runs that ended well among these cells (of one configuration and GPU
        count); None without such a run."""
        well = [attempt for cell in cells for attempt in self.of(cell) if attempt.status == "ok"]
        seconds = [attempt.seconds for attempt in well if attempt.seconds is not None and not attempt.resumed]
        return median(seconds) if seconds else None

    def _read(self, folder: Path) -> None:
        try:
            record = parse(read_bytes(folder / "run.json"))
            killed = find_killed(folder, server_time(folder)) if record["status"] == RUNNING else None
            if killed is not None:  # all ranks were killed at once, and no process is left to write the end
                end_for_rank_0(folder, "killed", killed.reason, killed.last)
                record = parse(read_bytes(folder / "run.json"))
                if record["status"] == RUNNING:  # it cannot be written from here
                    times = {**record["times"], "end": killed.last}
                    record |= {"status": "killed", "reason": killed.reason, "times": times}
            self.attempts[folder] = _attempt(folder, record)
            self.unreadable.discard(folder)
        except Exception:  # whatever a file holds, the others count; the report says what is wrong with it
            self.unreadable.add(folder)


def due(status: str, retry: str | None) -> bool:
    """Whether a cell of this status is started: a missing one, or one that is to be tried again."""
    return status in (MISSING, RUNNING) or (retry is not None and status in RETRIES[retry])


def _attempt(folder: Path, record: Object) -> Attempt:
    config, launch, times = (cast(dict[str, Any], record[name]) for name in ("config", "launch", "times"))
    before = added_later(Options) | section(record, "config_added_later")
    start, end, gpus = str(times["start"]), times["end"], int(launch["world_size"])
    seconds = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds() if end else None
    variables = section(section(record, "environment"), "variables")
    return Attempt(
        folder=folder,
        key=key_of(measured_part(config, before), gpus),
        status=str(record["status"]),
        reason=str(record.get("reason") or ""),
        start=start,
        seconds=max(0.0, seconds) if seconds is not None else None,
        gpus=gpus,
        saved=isinstance(record.get("checkpoints"), dict),
        resumed=isinstance(record.get("resume"), dict),
        job=variables.get(JOB_VARIABLE),
        restarts=str(variables.get(RESTARTS_VARIABLE, "0")),
        ended_by=cast(str | None, record.get("ended_by")),
    )
