"""Values of JSON become cells of a table. A value that does not fit its column is left out and noted, never guessed.
Rows become data frames whose columns have the types of record/columns.toml, all with missing values.

epochs.jsonl, a JSON object for each epoch, becomes a table with each epoch once and in order. The epochs of many
attempts are stored as columns: a Python object for each cell would need too much memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa

from ddlbench.foreign import Object
from ddlbench.record.schema import EPOCHS, Column, schema_of
from ddlbench.results.rows import Row
from ddlbench.texts import shortened

LONGEST_NAME = 120  # letters of a cell
LONGEST_TEXT = 10_000  # letters of a cell with sentences, lists or JSON
LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, sys.float_info.max

EPOCH_COLUMNS = tuple(column for column in EPOCHS if column.source != "run")
EPOCH_SCHEMA = schema_of(EPOCH_COLUMNS)
_BY_STAGE = ("memory_allocated_by_stage_bytes", "memory_host_by_stage_bytes")
_TEXTS = ("reason", "hosts", "framework_facts", "loader_facts", "throttle_reasons", "marks", *_BY_STAGE)
_NOTHING: tuple[Any, ...] = (None, {}, [])
DTYPES: dict[Any, Any] = {
    pa.int64(): pd.Int64Dtype(), pa.float64(): pd.Float64Dtype(), pa.bool_(): pd.BooleanDtype(),
    pa.string(): pd.StringDtype("python"),
}  # fmt: skip
_NOUNS = {"int": "a whole number of 64 bits", "float": "a finite number", "bool": "true or false"}


def fit(value: Any, column: Column, left_out: list[str]) -> Any:
    """The cell, or None with a note in `left_out` if the value does not fit the column."""
    fitting, reason = cell(value, column.kind), None
    if fitting is None:
        reason = None if value in _NOTHING else f"not {_NOUNS[column.kind]}"
    elif column.range and not column.range[0] <= fitting <= column.range[1]:
        reason = "must lie in {:g} to {:g}".format(*column.range)
    if reason:
        left_out.append(f"{column.name} = {shortened(json.dumps(value), 40)} ({reason})")
        return None
    if column.kind == "text" and fitting and column.name not in _TEXTS:
        return shortened(fitting, LONGEST_NAME)
    return fitting


def cell(value: Any, kind: str) -> Any:
    """A value of JSON as a table's cell; None, never 0, if it does not fit the column."""
    if value in _NOTHING:
        return None
    if kind == "text":
        if isinstance(value, list):
            text = " ".join(str(item) for item in cast(list[Any], value))
        else:
            text = json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)
        return shortened(text, LONGEST_TEXT)
    if kind == "bool":
        return value if isinstance(value, bool) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= LARGEST_FLOAT:  # NaN is not
        return None
    if kind == "float":
        return float(value)
    return int(value) if value == int(value) and abs(value) <= LARGEST_INT else None


def frame(columns: Iterable[Column], rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a data frame with the order and types of the columns; what a row does not have is missing."""
    return pa.Table.from_pylist(rows, schema_of(columns)).to_pandas(types_mapper=DTYPES.get)


def plain(table: pd.DataFrame, texts: Sequence[str], floats: Sequence[str]) -> Any:
    """Some columns of a table as plain objects and floats, with NaN for what is missing. Computing with them is many
    times faster than with types that have missing values."""
    columns = {name: table[name].to_numpy(object) for name in texts}
    return pd.DataFrame(columns | {name: table[name].to_numpy("float64", na_value=np.nan) for name in floats})


def epochs_of(lines: Sequence[Object], left_out: list[str]) -> Any:
    """A pyarrow table of EPOCH_SCHEMA from lines; it takes a tenth of the memory of rows. `left_out` gets notes on
    values that do not fit their columns, lines without the number of an epoch, and lines that repeat an epoch: the
    first line of an epoch counts."""
    rows = [{column.name: fit(line.get(column.source), column, left_out) for column in EPOCH_COLUMNS} for line in lines]
    numbered = [row for row in rows if row["epoch"] is not None]
    first = {row["epoch"]: row for row in reversed(numbered)}
    if len(numbered) < len(rows):
        left_out.append(f"{len(rows) - len(numbered)} line(s) of epochs.jsonl without the number of their epoch")
    if len(first) < len(numbered):
        left_out.append(f"{len(numbered) - len(first)} line(s) of epochs.jsonl that repeat an epoch")
    return pa.Table.from_pylist([first[number] for number in sorted(first)], EPOCH_SCHEMA)


def epochs_table(runs: Sequence[Row], epochs: Sequence[Any]) -> pd.DataFrame:
    """The epochs of all attempts as one table, in their order.

    runs:   rows of runs.csv
    epochs: the epochs of each run, a table of EPOCH_SCHEMA
    """
    places = np.repeat(np.arange(len(runs)), [len(table) for table in epochs])
    joined = pa.concat_tables([EPOCH_SCHEMA.empty_table(), *epochs]).combine_chunks().to_pandas(types_mapper=DTYPES.get)
    of_runs = frame([column for column in EPOCHS if column.source == "run"], runs)
    for name in of_runs:  # a value for each epoch of the run; equal texts are one object
        joined[name] = of_runs[name].array.take(places)
    return joined.filter([column.name for column in EPOCHS])
