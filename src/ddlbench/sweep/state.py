"""The state of a study, read from the records in its results folder (no other state is kept), and how it is shown."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, cast

from ddlbench.config.identity import added_later, measured_part
from ddlbench.config.keys import Options
from ddlbench.config.values import written
from ddlbench.errors import STATUSES, TIME_LIMIT
from ddlbench.foreign import Object, parse, read_bytes
from ddlbench.heartbeat import server_time
from ddlbench.record.files import HEARTBEAT, end_for_rank_0
from ddlbench.results.reading.killed import find_killed
from ddlbench.results.rows import group_by, section
from ddlbench.sweep.plan import INVALID, Cell, key_of, points
from ddlbench.texts import aligned, printable

MISSING, RUNNING, QUEUED = "missing", "running", "queued"
FINAL = ("ok", "unsupported")
JOB_VARIABLE, RESTARTS_VARIABLE = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"  # in a record's section `environment`
RETRIES = {
    choice: tuple(name for name, status in STATUSES.items() if choice in status.retry)
    for choice in ("failed", "oom", "all")
}
StatusOf = Callable[[Cell], str]  # the status of a cell, running ones included
Predict = Callable[[Cell], float | None] | None  # seconds of a run, at least; None where they are not known
WIDEST = 100  # letters of a cell of the table
AT_LEAST = "at least "


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
        runs = (run for run in _directories(self.results) if not run.name.startswith("."))
        for folder in (path for run in runs for path in _directories(run) if path.name.startswith("attempt-")):
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

    def gpu_hours(self, cells: Iterable[Cell]) -> float:
        """GPU-hours used so far, including failed attempts."""
        return sum((attempt.seconds or 0) * attempt.gpus for cell in cells for attempt in self.of(cell)) / 3600

    def _read(self, folder: Path) -> None:
        try:
            record = parse(read_bytes(folder / "run.json"))
            alive = record["status"] != RUNNING or not (folder / HEARTBEAT).exists()
            killed = None if alive else find_killed(folder, server_time(folder))
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


def _directories(folder: Path) -> list[Path]:
    """Without links: a study's results are real folders."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


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


def plan_lines(cells: Sequence[Cell], state: State, status_of: StatusOf, predict: Predict = None) -> list[str]:
    """A table with one row for each configuration and GPU count, the reasons below it, and sums."""
    rows: list[Mapping[str, Any]] = []
    axes = dict.fromkeys(axis for cell in cells for axis in cell.values)  # a framework may lack the key of some
    for (_, gpus), group in points(cells).items():
        estimated, least = _seconds(group, state, predict)
        left = [cell for cell in group if status_of(cell) == MISSING]
        rows.append(
            {
                **{axis: written(group[0].values.get(axis, "")) for axis in axes},
                "runs": str(len(group)),
                "status": _counted(_shown(cell, status_of) for cell in group),
                "s/run": "" if estimated is None else f"{least}{estimated:.1f}",
                "GPU-hours": "" if estimated is None else f"{least}{estimated * gpus * len(left) / 3600:.3f}",
            }
        )
    head = list(rows[0])
    lines = aligned(head, ([str(row[key])[:WIDEST] for key in head] for row in rows))
    refused = [group[0] for group in points(cells).values() if group[0].refused]
    for (status, why), same in group_by(refused, lambda cell: cell.refused).items():
        lines.append(f"{status} ({len(same)}, such as {same[0].name}): {why}")
    return [*lines, *sums(cells, state, status_of, predict)]


def status_lines(cells: Sequence[Cell], state: State, status_of: StatusOf) -> list[str]:
    """The number of cells of each status, the used and remaining time, and the reason of each failure."""
    lines = sums(cells, state, status_of)
    for cell in cells:
        if (status := status_of(cell)) not in (*FINAL, INVALID, MISSING, QUEUED, RUNNING):
            reason = state.of(cell)[-1].reason if state.of(cell) else ""
            lines.append(f"{cell.name} repeat {cell.repeat}: {status}: {printable(reason)[:300]}")
    if state.unreadable:
        lines.append(f"{len(state.unreadable)} records cannot be read: python -m ddlbench.report names them")
    return lines


def sums(cells: Sequence[Cell], state: State, status_of: StatusOf, predict: Predict = None) -> list[str]:
    """Cells by status; GPU-hours used; time and GPU-hours that remain, from finished cells, else predicted."""
    lines = [f"{len(cells)} cells: {_counted(_shown(cell, status_of) for cell in cells)}"]
    lines.append(f"GPU-hours used: {state.gpu_hours(cells):.3f}")
    serial = hours = unknown = 0.0
    bounds = ""
    for group in points(cells).values():
        left = sum(status_of(cell) == MISSING and not cell.refused for cell in group)
        seconds, least = _seconds(group, state, predict) if left else (None, "")
        bounds = bounds or least
        serial += (seconds or 0) * left
        hours += (seconds or 0) * left * group[0].gpus / 3600
        unknown += left if seconds is None else 0
    remaining = f"{bounds}{serial / 60:.1f} minutes, {hours:.3f} GPU-hours" if serial else "unknown"
    more = "more cells" if serial else "cells"
    rest = f"; {unknown:.0f} {more} have no finished run to estimate from" if unknown else ""
    if serial or unknown:
        lines.append(f"remaining, one after another: {remaining}{rest}")
    return lines


def _seconds(group: Sequence[Cell], state: State, predict: Predict) -> tuple[float | None, str]:
    """Seconds of one run of these cells, and a text that says whether they are a lower bound."""
    measured = state.estimate(group)
    if measured is not None:
        return measured, ""
    predicted = predict(group[0]) if predict else None
    return predicted, "" if predicted is None else AT_LEAST


def _shown(cell: Cell, status_of: StatusOf) -> str:
    """The status to show; for a cell without a record that is refused, the kind of refusal."""
    status = status_of(cell)
    return cell.refused[0] if status == MISSING and cell.refused else status


def _counted(statuses: Iterable[str]) -> str:
    counts = Counter(statuses)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{status} {count}" for status, count in sorted(counts.items()))
