"""epochs.csv of many attempts in little memory: complete columns instead of a Python object for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ddlbench.record.schema import EPOCHS
from ddlbench.results.reading.epoch_lines import NONE, TYPES
from ddlbench.results.tables.merge import Row

DTYPES: dict[str, Any] = {
    "int": pd.Int64Dtype(), "float": pd.Float64Dtype(), "bool": pd.BooleanDtype(), "text": pd.StringDtype("python"),
}  # fmt: skip


def array(values: Sequence[Any], kind: str) -> Any:
    """A column of a table; None where a value is missing."""
    return DTYPES[kind].__from_arrow__(pa.array(values, TYPES[kind], from_pandas=True))


def epochs_table(runs: Sequence[Row], counts: Sequence[int], epochs: list[Any]) -> pd.DataFrame:
    """The epochs of all attempts as one table, in their order.

    runs:   rows of runs.csv
    counts: epochs of each run
    epochs: these epochs, in tables of `lines.SCHEMA`; the list is emptied, so that no column is in memory twice
    """
    places = np.repeat(np.arange(len(runs)), counts)
    joined: Any = pa.concat_tables([NONE, *epochs])
    epochs.clear()
    columns = dict(zip(joined.column_names, joined.columns, strict=True))
    del joined
    cells: dict[str, Any] = {}
    for column in EPOCHS:
        if column.source == "run":  # once for each of its epochs; texts share their letters
            cells[column.name] = array([run[column.name] for run in runs], column.kind).take(places)
        else:
            cells[column.name] = DTYPES[column.kind].__from_arrow__(columns.pop(column.source).combine_chunks())
    return pd.DataFrame(cells, copy=False)
