"""Complete columns instead of a Python object for each cell: epochs.csv of many attempts in little memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ddlbench.record.schema import EPOCHS
from ddlbench.results.reading.epoch_lines import SCHEMA, TYPES
from ddlbench.results.rows import Row

DTYPES: dict[str, Any] = {
    "int": pd.Int64Dtype(), "float": pd.Float64Dtype(), "bool": pd.BooleanDtype(), "text": pd.StringDtype("python"),
}  # fmt: skip


def array(values: Sequence[Any], kind: str) -> Any:
    """A column of a table; None where a value is missing."""
    return DTYPES[kind].__from_arrow__(pa.array(values, TYPES[kind], from_pandas=True))


def epochs_table(runs: Sequence[Row], epochs: Sequence[Any]) -> pd.DataFrame:
    """The epochs of all attempts as one table, in their order.

    runs:   rows of runs.csv
    epochs: the epochs of each run, a table of `epoch_lines.SCHEMA`
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
