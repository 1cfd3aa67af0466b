"""epochs.jsonl, a JSON object for each epoch, as a table: each epoch once and in order. Those of many attempts are
complete columns instead of a Python object for each cell, to take little memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ddlbench.foreign import Object
from ddlbench.record.schema import EPOCHS
from ddlbench.results.reading.attempts import lines_of
from ddlbench.results.reading.cells import fit
from ddlbench.results.rows import Row

COLUMNS = tuple(column for column in EPOCHS if column.source != "run")
TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
SCHEMA = pa.schema([(column.name, TYPES[column.kind]) for column in COLUMNS])
DTYPES: dict[str, Any] = {
    "int": pd.Int64Dtype(), "float": pd.Float64Dtype(), "bool": pd.BooleanDtype(), "text": pd.StringDtype("python"),
}  # fmt: skip


def table_of(content: bytes, left_out: list[str]) -> tuple[Any, int]:
    """A pyarrow table of SCHEMA, which takes a tenth of the memory of rows, and the number of lines that cannot be
    read. `left_out` gets the notes of `epoch_rows`."""
    lines, broken = lines_of(content)
    return pa.Table.from_pylist(epoch_rows(lines, left_out), SCHEMA), broken


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


def array(values: Sequence[Any], kind: str) -> Any:
    """A column of a table; None where a value is missing."""
    return DTYPES[kind].__from_arrow__(pa.array(values, TYPES[kind], from_pandas=True))


def epochs_table(runs: Sequence[Row], epochs: Sequence[Any]) -> pd.DataFrame:
    """The epochs of all attempts as one table, in their order.

    runs:   rows of runs.csv
    epochs: the epochs of each run, a table of SCHEMA
    """
    places = np.repeat(np.arange(len(runs)), [len(table) for table in epochs])
    joined: Any = pa.concat_tables([SCHEMA.empty_table(), *epochs]).combine_chunks()
    cells: dict[str, Any] = {}
    for column in EPOCHS:
        if column.source == "run":  # once for each of its epochs; texts share their letters
            cells[column.name] = array([run[column.name] for run in runs], column.kind).take(places)
        else:
            cells[column.name] = DTYPES[column.kind].__from_arrow__(joined[column.name])
    return pd.DataFrame(cells, copy=False)
