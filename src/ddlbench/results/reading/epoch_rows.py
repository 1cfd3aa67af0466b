"""Rows of epochs.csv: the lines of one epochs.jsonl, each epoch once and in order."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.foreign import Object
from ddlbench.record.schema import EPOCHS
from ddlbench.results.reading.cells import fit
from ddlbench.results.tables.merge import Row

OWN = tuple(column for column in EPOCHS if column.source != "run")


def epoch_rows(lines: Sequence[Object], left_out: list[str]) -> list[Row]:
    """Rows of SCHEMA from lines. `left_out` gets a note for each value that does not fit its column, for lines without
    an epoch's number, and for lines that repeat an epoch: the first line counts."""
    rows = [{column.name: fit(line.get(column.source), column, left_out) for column in OWN} for line in lines]
    numbered = [row for row in rows if row["epoch"] is not None]
    first: dict[int, Row] = {}
    for row in numbered:
        first.setdefault(row["epoch"], row)
    if len(numbered) < len(rows):
        left_out.append(f"{len(rows) - len(numbered)} line(s) of epochs.jsonl without the number of their epoch")
    if len(first) < len(numbered):
        left_out.append(f"{len(numbered) - len(first)} line(s) of epochs.jsonl that repeat an epoch")
    return [first[number] for number in sorted(first)]
