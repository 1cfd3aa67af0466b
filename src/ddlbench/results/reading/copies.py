"""Copies of one attempt count once: a backup, or results that were synchronized twice."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlbench.foreign import read_bytes
from ddlbench.results.reading.attempts import Attempt
from ddlbench.results.rows import group_by
from ddlbench.texts import digest, printable

FILES = ("run.json", "epochs.jsonl")


@dataclass(frozen=True)
class Original:
    """A folder that holds an attempt.

    identity: equal for folders that hold copies of one attempt
    progress: whether the record has an end, and its number of epochs; the copy with the largest counts
    """

    path: Path
    identity: Hashable
    progress: tuple[bool, int]


def identity(attempt: Attempt) -> Hashable:
    """A hash of run_id, attempt and start. An unreadable record has its path instead; a record without a start is
    compared completely."""
    record = attempt.record
    if record["status"] == "unreadable":
        return attempt.path
    times = record.get("times")
    start = times.get("start") if isinstance(times, dict) else None
    return digest([record.get("run_id"), record.get("attempt"), start] if start else [record, attempt.epochs])


def without_copies(originals: Sequence[Original]) -> tuple[list[Original], list[str]]:
    """The folders that count, and a warning for each copy. If a record was copied during its run, the later state
    counts."""
    kept: list[Original] = []
    warnings: list[str] = []
    for same in group_by(originals, lambda original: original.identity).values():
        counted = max(same, key=lambda original: original.progress) if len(same) > 1 else same[0]  # the first of equals
        kept.append(counted)
        warnings += [_warning(copy.path, counted.path) for copy in same if copy is not counted]
    return kept, warnings


def _warning(copy: Path, counted: Path) -> str:
    differs = any(_content(copy / name) != _content(counted / name) for name in FILES)
    but = ", though their content differs" if differs else ""
    names = " and ".join(printable(str(path)) for path in (copy, counted))
    return f"{names} hold the same attempt (run_id, attempt, start){but}: only the latter counts"


def _content(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except (OSError, ValueError):
        return None
