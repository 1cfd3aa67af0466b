"""What makes measurements doubtful, as a short mark beside a row and its explanation below the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddlbench.texts import shortened

Row = dict[str, Any]

LINES_SHOWN = 20
LONGEST = 400
# What each mark means; of a straggler and of ranks that differ the mark itself names the rank or points to the run.
MEANINGS = {
    "throttled": "the driver lowered the clock of a GPU",
    "allocator retries": "the allocator ran out of memory and freed its cache",
    "load": "programs that are not of the run computed on the host",
    "cpu pressure": "processes waited for a core",
    "steal": "the hypervisor gave the cores to other machines",
    "one visible GPU": "each rank sees one GPU of its node: NCCL may not have used NVLink (docs/clusters.md)",
    "ranks differ": "the ranks' environments are not the same: see ranks_differ in runs.csv",
    "straggler": "its own step takes over a tenth longer than that of the other ranks of its stage",
}


def of_run(run: Row) -> list[str]:
    """The marks of a row of runs.csv; also what differs between its ranks, and its straggler with rank and host."""
    found = run["marks"].split("; ") if run["marks"] else []
    if run["ranks_differ"]:
        found.append("ranks differ")
    if run["straggler_rank"] is not None:
        host = f" on {run['straggler_host']}" if run["straggler_host"] else ""
        found.append(f"straggler rank {run['straggler_rank']}{host}")
    return found


def numbered(scaling: Sequence[Row]) -> list[Row]:
    """The rows of scaling.csv with `mark`, "!1": equal marks have the same number."""
    texts = _texts(scaling)
    return [row | {"mark": f"!{texts[row['marks']]}" if row["marks"] else ""} for row in scaling]


def explained(scaling: Sequence[Row]) -> list[str]:
    """What each number stands for, with the number of runs, and then what the words mean."""
    texts = list(_texts(scaling))
    lines = [f"!{number} {shortened(text, LONGEST)}" for number, text in enumerate(texts[:LINES_SHOWN], 1)]
    more = [f"and {len(texts) - LINES_SHOWN} more: see marks in scaling.csv"] if len(texts) > LINES_SHOWN else []
    parts = [part for text in texts for part in text.split("; ")]
    known = [name for name in MEANINGS if any(part.startswith(name) for part in parts)]
    return [*lines, *more, *(f"{name}: {MEANINGS[name]}" for name in known)]


def remarks(scaling: Sequence[Row]) -> list[str]:
    """What stands below the table: the marks explained, and which straggler would have none."""
    return [*explained(scaling), *_unknown_stragglers(scaling)]


def _unknown_stragglers(scaling: Sequence[Row]) -> list[str]:
    trained = [row for row in scaling if row["status"] == "ok" and (row["gpus"] or 0) > 1 and row["mode"] != "loader"]
    each = {row["measurement"]: row for row in trained}.values()
    unknown = sum(row["own_step_s"] is None for row in each)
    by_thread = any(row["own_step_s"] is not None and not row["profile_windows"] for row in each)
    found = (
        f"stragglers: not looked for in {unknown} of {len(each)} measurements on several ranks, whose own steps are "
        "not known: profile=true measures them",
        "stragglers on the CPU: by the time that ranks computed; one that sleeps or waits for a disk shows with "
        "profile=true alone",
    )
    return [line for line, says in zip(found, (unknown, by_thread), strict=True) if says]


def _texts(scaling: Sequence[Row]) -> dict[str, int]:
    """Numbers from 1, in the order of the rows."""
    return {text: n for n, text in enumerate(dict.fromkeys(row["marks"] for row in scaling if row["marks"]), 1)}
