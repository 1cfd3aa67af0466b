"""What makes measurements doubtful, as a short mark beside a row and its explanation below the table."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.results.reading.published import OWN
from ddlbench.results.rows import Row
from ddlbench.results.tables.measurement import Measurement
from ddlbench.texts import first_few, shortened

LINES_SHOWN = 20
LONGEST = 400
# The meaning of each mark. The mark of a straggler also names its rank; the mark "ranks differ" points to the run.
MEANINGS = {
    "throttled": "the driver lowered the clock of a GPU",
    "allocator retries": "the allocator ran out of memory and freed its cache",
    "load": "programs that are not of the run computed on the host",
    "cpu pressure": "processes waited for a core",
    "steal": "the hypervisor gave the cores to other machines",
    "one visible GPU": "each rank sees one GPU of its node: NCCL may not have used NVLink (docs/clusters.md)",
    "read ahead": "the loader may have read the batches before the measured time: neither its rate nor the data wait "
    "is that of a long epoch (more train.steps, or fewer loader.workers)",
    "ranks differ": "the ranks' environments are not the same: see ranks_differ in runs.csv",
    "reference": "not a result: it leaves out a part of the training (reference in runs.csv), and has no ratios",
    "straggler": "its own step takes over a tenth longer than that of the other ranks of its stage",
}


def marks_of(run: Row) -> list[str]:
    """The marks of a row of runs.csv, with those for a reference, ranks that differ and a straggler."""
    marks = run["marks"].split("; ") if run["marks"] else []
    if run["reference"]:
        marks.append(f"reference: {run['reference']}")
    if run["ranks_differ"]:
        marks.append("ranks differ")
    if run["straggler_rank"] is not None:
        host = f" on {run['straggler_host']}" if run["straggler_host"] else ""
        marks.append(f"straggler rank {run['straggler_rank']}{host}")
    return marks


def marks_explained(rows: Sequence[Measurement]) -> list[str]:
    """The marks behind each number, with the number of runs, and then the meaning of the words."""
    texts = {row["marks"]: row.mark for row in rows if row.mark}
    lines = [f"{number} {shortened(text, LONGEST)}" for text, number in texts.items()]
    parts = [part for text in texts for part in text.split("; ")]
    names = [name for name in MEANINGS if any(part.startswith(name) for part in parts)]
    return [
        *first_few(lines, LINES_SHOWN, "more: see marks in scaling.csv"),
        *(f"{name}: {MEANINGS[name]}" for name in names),
    ]


def unknown_stragglers(rows: Sequence[Measurement]) -> list[str]:
    """The number of own measurements without a search for stragglers."""
    ended = [row for row in rows if row["status"] == "ok" and row["origin"] == OWN]
    trained = [row for row in ended if (row["gpus"] or 0) > 1 and row["mode"] != "loader"]
    measured = {row["measurement"]: row for row in trained}.values()
    lines: list[str] = []
    if unknown := sum(row["own_step_s"] is None for row in measured):
        lines.append(
            f"stragglers: not looked for in {unknown} of {len(measured)} measurements on several ranks, whose own "
            "steps are not known: profile=true measures them"
        )
    if any(row["own_step_s"] is not None and not row["profile_windows"] for row in measured):
        lines.append(
            "stragglers on the CPU: by the time that ranks computed; one that sleeps or waits for a disk shows with "
            "profile=true alone"
        )
    return lines
