"""The state of a study, read from the records in its results folder (no other state is kept), and its progress as lines
of text: the status of its cells, and the time that they took and will take."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

from ddlbench.config.keys import Options, added_later, measured_part, written
from ddlbench.errors import STATUSES, TIME_LIMIT
from ddlbench.foreign import Object, parse, read_bytes, section
from ddlbench.oracle.machine.machine import Machine
from ddlbench.record.files import end_for_rank_0, find_killed, keeper_alive
from ddlbench.results.rows import group_by
from ddlbench.sweep.lock import FOLDER, Queue, holder, last_claim
from ddlbench.sweep.plan import INVALID, Cell, key_of, predicted_s
from ddlbench.texts import aligned, printable

MISSING, RUNNING, QUEUED = "missing", "running", "queued"
HELD = (QUEUED, RUNNING)
WIDEST = 100  # letters of a cell of the table
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
        last one was interrupted without a result. A time limit would end it again, unless it has saved a checkpoint."""
        attempts = self.of(cell)
        if not attempts:
            return MISSING
        last = next((attempt for attempt in attempts if attempt.status == "ok"), attempts[-1])
        interrupted = last.saved if last.ended_by == TIME_LIMIT else last.status == "killed"
        return MISSING if interrupted else last.status

    def of(self, cell: Cell) -> list[Attempt]:
        """The attempts at a cell, in order of their start."""
        return self._by_key.get(cell.key, [])

    def runs_here(self, cell: Cell) -> bool:
        """Whether a process of this machine keeps the record of an attempt, as of the last `refresh`."""
        for attempt in self.of(cell):
            with contextlib.suppress(Exception):  # no heartbeat, or none that can be read
                if attempt.status == RUNNING and keeper_alive(attempt.folder):
                    return True
        return False

    def _read(self, folder: Path) -> None:
        try:
            record = parse(read_bytes(folder / "run.json"))
            killed = find_killed(folder) if record["status"] == RUNNING else None
            if killed is not None:  # all ranks were killed at once, and no process is left to write the end
                reason, last = killed
                end_for_rank_0(folder, "killed", reason, last)
                record = parse(read_bytes(folder / "run.json"))
                if record["status"] == RUNNING:  # it cannot be written from here
                    record |= {"status": "killed", "reason": reason, "times": {**record["times"], "end": last}}
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


class Group(NamedTuple):
    """The cells of one configuration and GPU count.

    left: how many are missing; seconds: of one run, the median of complete runs that ended well, else predicted;
        least: "at least " for predicted ones
    """

    cells: list[Cell]
    left: int
    seconds: float | None
    least: str


@dataclass
class Overview:
    """The cells of a study, their records, and the jobs of Slurm at one moment. machine: the one that the seconds of
    cells without a run are predicted for; None: they are not"""

    cells: Sequence[Cell]
    state: State
    queued: Queue
    machine: Machine | None = None

    @cached_property
    def statuses(self) -> dict[str, str]:
        """The status of each cell by its key: `running` only if a process holds its claim or runs it on this machine,
        `queued` until its Slurm job has begun it, also after an attempt that failed."""
        return {cell.key: INVALID if cell.invalid else self._status(cell) for cell in self.cells}

    def _status(self, cell: Cell) -> str:
        recorded = self.state.status(cell)
        if recorded in FINAL:
            return recorded
        owner = holder(self.state.results, cell.key, self.queued)
        if recorded in (MISSING, RUNNING):
            if owner is None:
                return RUNNING if self.state.runs_here(cell) else MISSING
            return QUEUED if owner.job and recorded == MISSING else RUNNING
        start = (self.queued.starts or {}).get(owner.job or "") if owner else None
        begun = any((attempt.job, attempt.restarts) == start for attempt in self.state.of(cell))
        return QUEUED if start and not begun else recorded

    @cached_property
    def groups(self) -> list[Group]:
        groups: list[Group] = []
        by_axes = sorted(self.cells, key=lambda cell: cell.place)
        for cells in group_by(by_axes, lambda cell: (cell.family, cell.gpus)).values():
            left = sum(self.statuses[cell.key] == MISSING and not cell.refused for cell in cells)
            well = [run for cell in cells for run in self.state.of(cell) if run.status == "ok" and not run.resumed]
            measured = [run.seconds for run in well if run.seconds is not None]
            if measured:
                groups.append(Group(cells, left, median(measured), ""))
            else:
                predicted = predicted_s(self.machine, cells[0]) if self.machine else None
                groups.append(Group(cells, left, predicted, "at least "))
        return groups

    def plan_lines(self) -> list[str]:
        """A table with one row for each configuration and GPU count, the reasons below it, and sums."""
        rows = list[list[str]]()
        axes = dict.fromkeys(axis for cell in self.cells for axis in cell.values)  # a framework may lack some keys
        for cells, left, seconds, least in self.groups:
            values = [str(written(cells[0].values.get(axis, "")))[:WIDEST] for axis in axes]
            times = ["", ""]
            if seconds is not None:
                times = [f"{least}{seconds:.1f}", f"{least}{seconds * cells[0].gpus * left / 3600:.3f}"]
            rows.append([*values, str(len(cells)), self._counted(cells), *times])
        lines = aligned([*axes, "runs", "status", "s/run", "GPU-hours"], rows)
        refused = [group.cells[0] for group in self.groups if group.cells[0].refused]
        for (status, why), same in group_by(refused, lambda cell: cell.refused).items():
            lines.append(f"{status} ({len(same)}, such as {same[0].name}): {why}")
        return [*lines, *self._sums()]

    def status_lines(self) -> list[str]:
        """The number of cells of each status, the used and remaining time, the reason of each failure, and what is not
        known of Slurm's jobs."""
        lines = self._sums()
        for cell in self.cells:
            if (status := self.statuses[cell.key]) not in (*FINAL, INVALID, MISSING, *HELD):
                reason = self.state.of(cell)[-1].reason if self.state.of(cell) else ""
                lines.append(f"{cell.name} repeat {cell.repeat}: {status}: {printable(reason)[:300]}")
        if self.state.unreadable:
            lines.append(f"{len(self.state.unreadable)} records cannot be read: python -m ddlbench.report names them")
        left = [(status, key) for key, status in self.statuses.items() if status in (MISSING, *HELD)]
        owners = [(status, last_claim(self.state.results, key)[1]) for status, key in left]
        jobs = [(status, owner.job) for status, owner in owners if owner and owner.job]
        if self.queued.starts is None and any(status in HELD for status, _ in jobs):
            lines.append("squeue does not answer: cells of jobs that have ended may count as queued or running")
        if ended := [job for status, job in jobs if status == MISSING]:
            output = self.state.results / FOLDER / "logs" / f"{ended[0]}-*.out"
            lines.append(f"missing although their Slurm job has ended: {len(ended)} cells; its output: {output}")
        return lines

    def _sums(self) -> list[str]:
        """Cells by status; GPU-hours used; time and GPU-hours that remain, from finished cells, else predicted."""
        attempts = [attempt for cell in self.cells for attempt in self.state.of(cell)]  # failed ones too
        used = sum((attempt.seconds or 0) * attempt.gpus for attempt in attempts) / 3600
        lines = [f"{len(self.cells)} cells: {self._counted(self.cells)}", f"GPU-hours used: {used:.3f}"]
        serial = sum((group.seconds or 0) * group.left for group in self.groups)
        hours = sum((group.seconds or 0) * group.left * group.cells[0].gpus / 3600 for group in self.groups)
        unknown = sum(group.left for group in self.groups if group.seconds is None)
        least = next((group.least for group in self.groups if group.left and group.seconds and group.least), "")
        remaining = f"{least}{serial / 60:.1f} minutes, {hours:.3f} GPU-hours" if serial else "unknown"
        more = "more cells" if serial else "cells"
        rest = f"; {unknown} {more} have no finished run to estimate from" if unknown else ""
        if serial or unknown:
            lines.append(f"remaining, one after another: {remaining}{rest}")
        return lines

    def _counted(self, cells: Sequence[Cell]) -> str:
        """How many cells have each status; those without a record that are refused count as such."""
        shown = ((cell.refused, self.statuses[cell.key]) for cell in cells)
        statuses = [refused[0] if refused and status == MISSING else status for refused, status in shown]
        counts = sorted(Counter(statuses).items())
        return statuses[0] if len(counts) == 1 else ", ".join(f"{status} {count}" for status, count in counts)
