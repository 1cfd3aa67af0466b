"""epochs.csv of many attempts in little memory: whole columns at once instead of a Python object for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ddlbench.record.schema import EPOCHS
from ddlbench.report.lines import NONE
from ddlbench.report.merge import Row

DTYPES: dict[str, Any] = {
    "int": pd.Int64Dtype(), "float": pd.Float64Dtype(), "bool": pd.BooleanDtype(), "text": pd.StringDtype("python"),
}  # fmt: skip


def epochs_table(runs: Sequence[Row], epochs: list[Any]) -> pd.DataFrame:
    """The epochs of all attempts as one table, in their order. epochs: a table of `lines.SCHEMA` for each row of
    runs.csv; the list is emptied, so that no column is in memory twice"""
    places = np.repeat(np.arange(len(epochs)), [len(own) for own in epochs])
    joined: Any = pa.concat_tables([NONE, *epochs])
    epochs.clear()
    own = dict(zip(joined.column_names, joined.columns, strict=True))
    del joined
    cells: dict[str, Any] = {}
    for column in EPOCHS:
        dtype = DTYPES[column.kind]
        if column.source == "run":  # once for each of its epochs; texts share their letters
            cells[column.name] = pd.array([run[column.name] for run in runs], dtype=dtype).take(places)
        else:
            cells[column.name] = dtype.__from_arrow__(own.pop(column.source).combine_chunks())
    return pd.DataFrame(cells, copy=False)
