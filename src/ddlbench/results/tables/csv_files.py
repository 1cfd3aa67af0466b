"""Tables as CSV files, as spreadsheets may open them: no text is run as a formula.

The files hold what `pandas.DataFrame.to_csv` writes, digit for digit, in a tenth of its time: epochs.csv has a million
rows in a large campaign. Whole columns become text at once, by pyarrow.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute

from ddlbench.results.tables.cell_texts import quoted

ROWS = 20_000  # that are text at a time
SPECIAL = frozenset(',"\r\n')  # a field with one of them has quotation marks around it
# pyarrow's compute functions are made when it is imported: no type checker knows their names.
call: Any = pyarrow.compute.call_function
_text = pa.large_string()
_join: Any = partial(call, "binary_join_element_wise", options=pyarrow.compute.JoinOptions("replace", ""))


def write_csv(table: pd.DataFrame, path: Path, threads: int = 1) -> None:
    """Write a table as CSV with a header; a missing cell is empty. A text that a spreadsheet would run as a formula
    gets a ' before it. threads: threads that make text of rows; pyarrow's part uses several cores"""
    starts = range(0, len(table), ROWS)
    with path.open("wb") as file, ThreadPoolExecutor(threads) as pool:
        file.write(f"{','.join(map(field, table.columns))}\n".encode())
        for number in range(0, len(starts), threads):  # what was made and not written yet is in memory
            file.writelines(pool.map(partial(_lines, table), starts[number : number + threads]))


def field(text: str) -> str:
    """A text as a field of a CSV file."""
    safe = quoted(text)
    doubled = safe.replace('"', '""')
    return f'"{doubled}"' if SPECIAL.intersection(safe) else safe


def _lines(table: pd.DataFrame, start: int) -> Any:
    """The bytes of ROWS rows, each with its newline."""
    rows = table.iloc[start : start + ROWS]
    cells = [_cells(pa.array(rows[name])) for name in rows]
    lines = _join([*cells, pa.scalar(",", _text)])
    ended = _join([lines, pa.scalar("", _text), pa.scalar("\n", _text)])
    _, ends, letters = ended.buffers()
    return letters.slice(0, int(np.frombuffer(ends, np.int64)[len(ended)]))


def _cells(values: Any) -> Any:
    """A column as text."""
    if values.null_count == len(values):
        return pa.nulls(len(values), _text)
    if pa.types.is_boolean(values.type):
        return call("if_else", [values, pa.scalar("True", _text), pa.scalar("False", _text)])
    if pa.types.is_floating(values.type):
        return _floats(values)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        different = values.dictionary_encode()  # epochs.csv repeats the texts of its runs
        return pa.array([field(text) for text in different.dictionary.to_pylist()], _text).take(different.indices)
    return values.cast(_text)


def _floats(values: Any) -> Any:
    """The shortest digits that give the same number, as Python writes them. pyarrow has the same digits, but writes 3
    for 3.0, 0.00001 for 1e-05, and an exponent from about ten digits before the point on."""
    numbers = values.to_numpy(zero_copy_only=False)
    valid = values.is_valid().to_numpy(zero_copy_only=False) & ~np.isnan(numbers)
    size = np.abs(numbers)
    other = valid & ((numbers == np.trunc(numbers)) | (size < 1e-4) | (size >= 1e9))
    texts = call("if_else", [pa.array(valid), values.cast(_text), pa.scalar(None, _text)])
    return call("replace_with_mask", [texts, pa.array(other), pa.array(map(repr, numbers[other].tolist()), _text)])
