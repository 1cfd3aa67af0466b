"""epochs.jsonl, a JSON object for each epoch, as a table: each epoch once and in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ddlbench.foreign import Object, parse
from ddlbench.record.schema import EPOCHS
from ddlbench.results.reading.cells import fit
from ddlbench.results.rows import Row

COLUMNS = tuple(column for column in EPOCHS if column.source != "run")
TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
SCHEMA = pa.schema([(column.name, TYPES[column.kind]) for column in COLUMNS])


def table_of(content: bytes, left_out: list[str]) -> tuple[Any, int]:
    """A pyarrow table of SCHEMA, which takes a tenth of the memory of rows, and the number of lines that cannot be
    read. `left_out` gets the notes of `epoch_rows`."""
    lines, broken = lines_of(content)
    return pa.Table.from_pylist(epoch_rows(lines, left_out), SCHEMA), broken


def lines_of(content: bytes) -> tuple[list[Object], int]:
    """The JSON objects, and the number of lines that are not one: a killed process may leave half a line."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    objects: list[Object] = []
    for line in lines:
        try:
            objects.append(parse(line))
        except ValueError:
            continue
    return objects, len(lines) - len(objects)


def epoch_rows(lines: Sequence[Object], left_out: list[str]) -> list[Row]:
    """Rows of SCHEMA from lines. `left_out` gets a note for each value that does not fit its column, for lines without
    an epoch's number, and for lines that repeat an epoch: the first line counts."""
    rows = [{column.name: fit(line.get(column.source), column, left_out) for column in COLUMNS} for line in lines]
    numbered = [row for row in rows if row["epoch"] is not None]
    first: dict[int, Row] = {}
    for row in numbered:
        first.setdefault(row["epoch"], row)
    if len(numbered) < len(rows):
        left_out.append(f"{len(rows) - len(numbered)} line(s) of epochs.jsonl without the number of their epoch")
    if len(first) < len(numbered):
        left_out.append(f"{len(numbered) - len(first)} line(s) of epochs.jsonl that repeat an epoch")
    return [first[number] for number in sorted(first)]
