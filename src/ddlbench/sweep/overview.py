"""How far a study is, in lines: the status of its cells, and the time that they took and will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ddlbench.config.keys import written
from ddlbench.results.rows import group_by
from ddlbench.sweep.lock import FOLDER, holder, last_job
from ddlbench.sweep.plan import INVALID, Cell, points
from ddlbench.sweep.slurm import Queue
from ddlbench.sweep.state import FINAL, MISSING, RUNNING, State
from ddlbench.texts import aligned, printable

QUEUED = "queued"
HELD = (QUEUED, RUNNING)
WIDEST = 100  # letters of a cell of the table


class Group(NamedTuple):
    """The cells of one configuration and GPU count.

    left: how many are missing; seconds: of one run, measured, else predicted; least: "at least " for predicted ones
    """

    cells: list[Cell]
    left: int
    seconds: float | None
    least: str


@dataclass
class Overview:
    """The cells of a study, their records, and the jobs of Slurm at one moment.

    predict: seconds of a run of a cell, at least; None where they are not known
    """

    cells: Sequence[Cell]
    state: State
    queued: Queue
    predict: Callable[[Cell], float | None] = lambda _: None

    @cached_property
    def statuses(self) -> dict[str, str]:
        """The status of each cell by its key: `running` only if a process holds its claim, `queued` until its Slurm job
        has begun it, also after an attempt that failed."""
        return {cell.key: INVALID if cell.invalid else self._status(cell) for cell in self.cells}

    def _status(self, cell: Cell) -> str:
        recorded = self.state.status(cell)
        if recorded in FINAL:
            return recorded
        owner = holder(self.state.results, cell.key, self.queued)
        if recorded in (MISSING, RUNNING):
            return MISSING if owner is None else QUEUED if owner.job and recorded == MISSING else RUNNING
        start = (self.queued.starts or {}).get(owner.job or "") if owner else None
        begun = any((attempt.job, attempt.restarts) == start for attempt in self.state.of(cell))
        return QUEUED if start and not begun else recorded

    @cached_property
    def groups(self) -> list[Group]:
        groups: list[Group] = []
        for cells in points(self.cells).values():
            left = sum(self.statuses[cell.key] == MISSING and not cell.refused for cell in cells)
            measured = self.state.estimate(cells)
            if measured is None:
                groups.append(Group(cells, left, self.predict(cells[0]), "at least "))
            else:
                groups.append(Group(cells, left, measured, ""))
        return groups

    def plan_lines(self) -> list[str]:
        """A table with one row for each configuration and GPU count, the reasons below it, and sums."""
        rows: list[Mapping[str, str]] = []
        axes = dict.fromkeys(axis for cell in self.cells for axis in cell.values)  # a framework may lack some keys
        for cells, left, seconds, least in self.groups:
            hours = None if seconds is None else seconds * cells[0].gpus * left / 3600
            rows.append(
                {
                    **{axis: str(written(cells[0].values.get(axis, "")))[:WIDEST] for axis in axes},
                    "runs": str(len(cells)),
                    "status": self._counted(cells),
                    "s/run": "" if seconds is None else f"{least}{seconds:.1f}",
                    "GPU-hours": "" if hours is None else f"{least}{hours:.3f}",
                }
            )
        lines = aligned(list(rows[0]), (list(row.values()) for row in rows))
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
        if self.queued.starts is None and any(self._jobs(*HELD)):
            lines.append("squeue does not answer: cells of jobs that have ended may count as queued or running")
        if ended := list(self._jobs(MISSING)):
            output = self.state.results / FOLDER / "logs" / f"{ended[0]}-*.out"
            lines.append(f"missing although their Slurm job has ended: {len(ended)} cells; its output: {output}")
        return lines

    def _jobs(self, *statuses: str) -> Iterable[str]:
        """The Slurm jobs that claimed the cells of these statuses last."""
        of_status = (cell for cell in self.cells if self.statuses[cell.key] in statuses)
        return filter(None, (last_job(self.state.results, cell.key) for cell in of_status))

    def _sums(self) -> list[str]:
        """Cells by status; GPU-hours used; time and GPU-hours that remain, from finished cells, else predicted."""
        attempts = [attempt for cell in self.cells for attempt in self.state.of(cell)]  # failed ones too
        used = sum((attempt.seconds or 0) * attempt.gpus for attempt in attempts) / 3600
        lines = [f"{len(self.cells)} cells: {self._counted(self.cells)}", f"GPU-hours used: {used:.3f}"]
        serial = hours = 0.0
        unknown = 0
        for cells, left, seconds, _ in self.groups:
            serial += (seconds or 0) * left
            hours += (seconds or 0) * left * cells[0].gpus / 3600
            unknown += left if seconds is None else 0
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
