"""A cell whose run ended before it had a record (wrong data folder, an import that fails): its row, from exit codes and
output."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddlbench.config.compose import configuration, configurations
from ddlbench.errors import STATUSES, TIME_LIMIT, PeerFailed
from ddlbench.record.record import Record, run_id
from ddlbench.sweep.plan import Cell

LIMIT = (128 + signal.SIGUSR1, -signal.SIGUSR1)  # of a rank, or of a process that was not yet one
INTERRUPTS = {code for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for code in (-number, 128 + number)}
BY_CODE = {status.exit_code: name for name, status in STATUSES.items() if status.exit_code not in INTERRUPTS}
SAID = re.compile(r"ddlbench(?: \(rank \d+\))?: (?!warning: |advice: |the record )(?:[a-z]+: )?(.+)")
LONGEST = 1000  # letters of a reason


def record_early_end(cell: Cell, results: Path, codes: Sequence[int], began: str, said: str) -> bool:
    """Write a record without measurements for a run that left none. False for a run that a signal interrupted: its cell
    runs again.

    began: in the format of a record's times; said: the output of all ranks
    """
    if INTERRUPTS.issuperset(code for code in codes if code):  # a sweep ends the others of a rank that failed
        return False
    code = first_failure(codes) or max(codes)
    return write_row(cell, results, *ended_with(code), _reason(codes, said), began)


def ended_with(code: int) -> tuple[str, str | None]:
    """The status of a run that ended with this exit code, and what ended it, as errors.py names both."""
    return ("killed", TIME_LIMIT) if code in LIMIT else (BY_CODE.get(code, "error"), None)


def first_failure(codes: Iterable[int]) -> int | None:
    """The exit code of the first rank that failed by itself, neither because another rank failed nor by a signal from
    outside."""
    return next((code for code in codes if code not in (0, PeerFailed.exit_code, *INTERRUPTS)), None)


def write_row(
    cell: Cell,
    results: Path,
    status: str,
    ended_by: str | None,
    reason: str,
    began: str,
    ended: str | None = None,
    **sections: Any,
) -> bool:
    """Write a record without measurements; whether it is on disk.

    began, ended: in the format of a record's times; without `ended`: now
    sections: further content, by sections of run.json
    """
    with configurations():
        config = configuration(*cell.words)
    content: dict[str, Any] = {
        "times": {"start": began, "end": None},
        "config": config.resolved,
        "config_added_later": config.added_later,
        "launch": {"world_size": cell.gpus, "nodes": 1, "ranks_per_node": cell.gpus},
        "dataset": {"name": config.data.name, "kind": config.data.kind},
        **sections,
    }
    name = run_id(config.identity(), cell.gpus, content["launch"]["nodes"], "unknown")
    return Record.open(str(results), name, content).finish(status, reason[:LONGEST], end=ended, ended_by=ended_by)


def _reason(codes: Sequence[int], said: str) -> str:
    exits = f"the run ended before it had a record: exit codes {', '.join(map(str, codes))}"
    signals = [f"rank {rank} received SIGUSR1" for rank, code in enumerate(codes) if code in LIMIT]
    return "; ".join([*(lines(said)[:1] or signals[:1]), exits])


def lines(said: str) -> list[str]:
    """The lines in which ddlbench reported the end."""
    return [match[1] for line in said.splitlines() if (match := SAID.fullmatch(line.strip()))]
