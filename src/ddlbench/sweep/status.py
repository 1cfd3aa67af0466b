"""The output of a sweep: the plan, and its progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddlbench.config.values import written
from ddlbench.results.rows import group_by
from ddlbench.sweep.plan import INVALID, Cell, points
from ddlbench.sweep.state import MISSING, QUEUED, RUNNING, State
from ddlbench.texts import aligned, printable

StatusOf = Callable[[Cell], str]  # the status of a cell, running ones included
Predict = Callable[[Cell], float | None] | None  # seconds of a run, at least; None where they are not known
WIDEST = 100  # letters of a cell of the table
AT_LEAST = "at least "


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
        if (status := status_of(cell)) not in ("ok", "unsupported", INVALID, MISSING, QUEUED, RUNNING):
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
