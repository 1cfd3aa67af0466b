"""One row an attempt: of several folders that hold the same one (a backup, results synchronised twice) one counts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ddlbench.report.merge import digest, group_by
from ddlbench.report.read import Attempt


def without_copies(attempts: Sequence[Attempt]) -> tuple[list[Attempt], list[str]]:
    """The attempts without copies, and a warning for each copy. Of a record that was copied while its run went on,
    the later state counts."""
    kept: list[Attempt] = []
    warnings: list[str] = []
    for same in group_by(attempts, _identity).values():
        counted = max(same, key=_progress) if len(same) > 1 else same[0]  # the first of equals
        kept.append(counted)
        warnings += [_warning(copy, counted) for copy in same if copy is not counted]
    return kept, warnings


def _identity(attempt: Attempt) -> Hashable:
    """run_id, attempt and start. An unreadable record may be anything; one without a start is compared whole."""
    record = attempt.record
    if record["status"] == "unreadable":
        return attempt.path
    times = record.get("times")
    start = times.get("start") if isinstance(times, dict) else None
    return digest([record.get("run_id"), record.get("attempt"), start] if start else [record, attempt.epochs])


def _progress(attempt: Attempt) -> tuple[bool, int]:
    return attempt.has_end, len(attempt.epochs)


def _warning(copy: Attempt, counted: Attempt) -> str:
    differs = copy.record != counted.record or copy.epochs != counted.epochs
    but = ", though their content differs" if differs else ""
    return f"{copy.name} and {counted.name} hold the same attempt (run_id, attempt, start){but}: only the latter counts"
