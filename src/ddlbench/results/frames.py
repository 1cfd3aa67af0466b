"""Data frames whose columns have the types of record/columns.toml; each type knows missing values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ddlbench.record.schema import Column, schema_of
from ddlbench.results.rows import Row

DTYPES: dict[Any, Any] = {
    pa.int64(): pd.Int64Dtype(), pa.float64(): pd.Float64Dtype(), pa.bool_(): pd.BooleanDtype(),
    pa.string(): pd.StringDtype("python"),
}  # fmt: skip


def typed(table: Any) -> pd.DataFrame:
    """A pyarrow table of such columns as a data frame."""
    return table.to_pandas(types_mapper=DTYPES.get)


def frame(columns: Iterable[Column], rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a data frame with the columns' order and types; what a row does not have is missing."""
    return typed(pa.Table.from_pylist(rows, schema_of(columns)))


def plain(table: pd.DataFrame, texts: Sequence[str], floats: Sequence[str]) -> Any:
    """Some columns of a table as plain objects and floats, with NaN for what is missing: many times faster than columns
    that know missing values."""
    columns = {name: table[name].to_numpy(object) for name in texts}
    return pd.DataFrame(columns | {name: table[name].to_numpy("float64", na_value=np.nan) for name in floats})
