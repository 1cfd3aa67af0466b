"""epochs.jsonl, a JSON object for each epoch, as a table: each epoch once and in order. Those of many attempts are
complete columns instead of a Python object for each cell, to take little memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ddlbench.foreign import Object
from ddlbench.record.schema import EPOCHS, schema_of
from ddlbench.results.frames import frame, typed
from ddlbench.results.reading.cells import fit
from ddlbench.results.rows import Row

COLUMNS = tuple(column for column in EPOCHS if column.source != "run")
SCHEMA = schema_of(COLUMNS)


def epochs_of(lines: Sequence[Object], left_out: list[str]) -> Any:
    """A pyarrow table of SCHEMA from lines, which takes a tenth of the memory of rows. `left_out` gets a note for each
    value that does not fit its column, for lines without an epoch's number, and for lines that repeat an epoch: the
    first line counts."""
    rows = [{column.name: fit(line.get(column.source), column, left_out) for column in COLUMNS} for line in lines]
    numbered = [row for row in rows if row["epoch"] is not None]
    first = {row["epoch"]: row for row in reversed(numbered)}
    if len(numbered) < len(rows):
        left_out.append(f"{len(rows) - len(numbered)} line(s) of epochs.jsonl without the number of their epoch")
    if len(first) < len(numbered):
        left_out.append(f"{len(numbered) - len(first)} line(s) of epochs.jsonl that repeat an epoch")
    return pa.Table.from_pylist([first[number] for number in sorted(first)], SCHEMA)


def epochs_table(runs: Sequence[Row], epochs: Sequence[Any]) -> pd.DataFrame:
    """The epochs of all attempts as one table, in their order.

    runs:   rows of runs.csv
    epochs: the epochs of each run, a table of SCHEMA
    """
    places = np.repeat(np.arange(len(runs)), [len(table) for table in epochs])
    joined = typed(pa.concat_tables([SCHEMA.empty_table(), *epochs]).combine_chunks())
    of_runs = frame([column for column in EPOCHS if column.source == "run"], runs)
    for name in of_runs:  # once for each of its epochs; texts share their letters
        joined[name] = of_runs[name].array.take(places)
    return joined.filter([column.name for column in EPOCHS])
