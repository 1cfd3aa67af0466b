"""epochs.csv of many attempts in little memory: whole columns at once instead of a Python object for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from pandas.arrays import BooleanArray, FloatingArray, IntegerArray

from ddlbench.record.schema import EPOCHS, Column
from ddlbench.report.cells import fit
from ddlbench.report.epochs import OWN, epoch_rows
from ddlbench.report.files import Object
from ddlbench.report.merge import Row

Cells: TypeAlias = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]  # values, and whether each is missing
TYPES = {"int": np.int64, "float": np.float64, "bool": np.bool_, "text": np.object_}
ARRAYS: dict[str, Any] = {"int": IntegerArray, "float": FloatingArray, "bool": BooleanArray}
LAST_EPOCH = 10**9
PLAIN = {"int": {int}, "float": {int, float}, "bool": {bool}}  # types whose values need no cell of their own


@dataclass
class Block:
    """The epochs of one attempt: the columns in which something is known."""

    run: Row
    length: int
    columns: dict[str, Cells]


def block(run: Row, lines: Sequence[Object], left_out: list[str]) -> Block:
    """The lines of epochs.jsonl as columns. `left_out` gets what `epoch_rows` says of lines and values."""
    values = _by_key(lines)
    if _in_order(values.get("epoch", [])):
        found = {column.name: values[column.source] for column in OWN if column.source in values}
        noted, length = left_out, len(lines)
    else:
        rows = epoch_rows(lines, left_out)
        found = {column.name: [row[column.name] for row in rows] for column in OWN}
        noted, length = [], len(rows)
    cells = {column.name: _cells(found[column.name], column, noted) for column in OWN if column.name in found}
    return Block(run, length, {name: known for name, known in cells.items() if known is not None})


def epochs_table(blocks: Sequence[Block]) -> pd.DataFrame:
    """All blocks as one table, in their order. It empties them, so that no column is in memory twice."""
    lengths = np.array([own.length for own in blocks], dtype=np.int64)
    return pd.DataFrame({column.name: _joined(column, blocks, lengths) for column in EPOCHS}, copy=False)


def _by_key(lines: Sequence[Object]) -> dict[str, Sequence[Any]]:
    """The values of each key over the lines, None where a line has none."""
    keys = tuple(lines[0]) if lines else ()
    if all(tuple(line) == keys for line in lines):  # usual, and five times as fast
        return dict(zip(keys, zip(*(line.values() for line in lines), strict=True), strict=True))
    return {key: [line.get(key) for line in lines] for key in dict.fromkeys(key for line in lines for key in line)}


def _in_order(numbers: Sequence[Any]) -> bool:
    """Whether every line has a number of its own, and they ascend: nothing to sort or to leave out."""
    if set(map(type, numbers)) != {int} or numbers[0] < 0 or numbers[-1] > LAST_EPOCH:
        return False
    return all(one < two for one, two in pairwise(numbers))


def _cells(values: Sequence[Any], column: Column, left_out: list[str]) -> Cells | None:
    """None where no value is known."""
    kinds = set(map(type, values))
    if kinds <= {NoneType}:
        return None
    if kinds <= PLAIN.get(column.kind, set()):  # nothing is missing
        found = _array(values, column)
        if found is not None:
            return found, np.zeros(len(values), dtype=bool)
    fitted = [fit(value, column, left_out) for value in values]
    missing = np.array([value is None for value in fitted])
    filled = [0 if value is None else value for value in fitted]
    return None if missing.all() else (np.array(filled, dtype=TYPES[column.kind]), missing)


def _array(values: Sequence[Any], column: Column) -> np.ndarray[Any, Any] | None:
    """None where a value is not finite, does not fit 64 bits, or is outside the column's range."""
    try:
        found = np.array(values, dtype=TYPES[column.kind])
    except OverflowError:
        return None
    low, high = column.range or (-np.inf, np.inf)
    within = column.kind == "bool" or (np.isfinite(found).all() and low <= found.min() and found.max() <= high)
    return found if within else None


def _joined(column: Column, blocks: Sequence[Block], lengths: np.ndarray[Any, Any]) -> Any:
    if column.source == "run":
        return _repeated(column, [own.run[column.name] for own in blocks], lengths)
    total = int(lengths.sum())
    values, missing = np.zeros(total, dtype=TYPES[column.kind]), np.ones(total, dtype=bool)
    start = 0
    for own in blocks:
        cells = own.columns.pop(column.name, None)
        if cells is not None:
            values[start : start + own.length], missing[start : start + own.length] = cells
        start += own.length
    return _column_of(column, values, missing)


def _column_of(column: Column, values: np.ndarray[Any, Any], missing: np.ndarray[Any, Any]) -> Any:
    if column.kind != "text":
        return ARRAYS[column.kind](values, missing)
    values[missing] = pd.NA
    return pd.array(values, dtype=pd.StringDtype("python"))


def _repeated(column: Column, values: Sequence[Any], lengths: np.ndarray[Any, Any]) -> Any:
    """A value of each attempt, once for each of its epochs. Texts share their letters."""
    missing = np.array([value is None for value in values], dtype=bool)
    known = np.array([0 if value is None else value for value in values], dtype=TYPES[column.kind])
    return _column_of(column, np.repeat(known, lengths), np.repeat(missing, lengths))
