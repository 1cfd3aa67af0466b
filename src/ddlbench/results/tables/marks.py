"""Marks: the reasons to doubt a measurement, and their explanations below the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddlbench.results.rows import OWN, Row
from ddlbench.results.tables.measurement import Measurement
from ddlbench.texts import first_few, shortened

LINES_SHOWN = 20
LONGEST = 400
# The meaning of each mark, by its name.
MEANINGS = {
    "throttled": "the driver lowered the clock of a GPU",
    "allocator retries": "the allocator ran out of memory and freed its cache",
    "load": "programs that are not of the run computed on the host",
    "cpu pressure": "processes waited for a core",
    "steal": "the hypervisor gave the cores to other machines",
    "one visible GPU": "each rank sees one GPU of its node: NCCL may not have used NVLink (docs/clusters.md)",
    "read ahead": "the loader may have read the batches before the measured time: neither its rate nor the data wait "
    "is that of a long epoch (more train.steps, or fewer loader.workers)",
    "cold epoch": "the attempt continued another one and had one epoch left, in which workers start and memory is "
    "allocated: that of other repeats is a later epoch",
    "ranks differ": "the ranks' environments are not the same: see ranks_differ in runs.csv",
    "reference": "not a result: it leaves out a part of the training (reference in runs.csv), and has no ratios",
    "straggler": "its own step takes over a tenth longer than that of the other ranks of its stage",
}


def marks_of(run: Row) -> dict[str, str]:
    """The marks of a row of runs.csv by their names: those of the record, and those for a reference, ranks that differ
    and a straggler, whose text says which rank it is."""
    marks = {name: name for name in (run["marks"] or "").split("; ") if name}
    if run["reference"]:
        marks["reference"] = f"reference: {run['reference']}"
    if run["ranks_differ"]:
        marks["ranks differ"] = "ranks differ"
    if run["straggler_rank"] is not None:
        marks["straggler"] = f"straggler {straggler(run)}"
    return marks


def straggler(run: Row) -> str:
    """The straggler of a run that has one, "rank 1 on node7"."""
    return f"rank {run['straggler_rank']}" + (f" on {run['straggler_host']}" if run["straggler_host"] else "")


def marks_explained(rows: Sequence[Measurement]) -> list[str]:
    """The marks behind each number, with the number of runs, and then the meaning of their names."""
    texts = {row.marks_number: row["marks"] for row in rows if row.marks_number}
    lines = [f"{number} {shortened(text, LONGEST)}" for number, text in texts.items()]
    names = {name for row in rows for name in row.mark_names}
    return [
        *first_few(lines, LINES_SHOWN, "more: see marks in scaling.csv"),
        *(f"{name}: {meaning}" for name, meaning in MEANINGS.items() if name in names),
    ]


def unknown_stragglers(rows: Sequence[Measurement]) -> Iterator[str]:
    """The number of own measurements without a search for stragglers."""
    ended = [row for row in rows if row["status"] == "ok" and row["origin"] == OWN]
    trained = [row for row in ended if (row["gpus"] or 0) > 1 and row["mode"] != "loader"]
    measured = {row["measurement"]: row for row in trained}.values()
    if unknown := sum(row["own_step_s"] is None for row in measured):
        yield (
            f"stragglers: not looked for in {unknown} of {len(measured)} measurements on several ranks, whose own "
            "steps are not known: profile=true measures them"
        )
    if any(row["own_step_source"] == "thread" for row in measured):
        yield (
            "stragglers on the CPU: by the time that ranks computed; one that sleeps or waits for a disk shows with "
            "profile=true alone"
        )
