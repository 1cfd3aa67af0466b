"""epochs.jsonl, a JSON object for each epoch, as a table: complete columns, not a Python object for each cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import accumulate, chain, compress, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.json

from ddlbench.foreign import Object, parse
from ddlbench.record.schema import Column
from ddlbench.results.reading.cells import LONGEST_NAME, fit
from ddlbench.results.reading.epoch_rows import OWN, epoch_rows

TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
SCHEMA = pa.schema([(column.source, TYPES[column.kind]) for column in OWN])
NONE: Any = SCHEMA.empty_table()
# A list, an escape, a character that does not print, and what pyarrow takes for a number.
UNUSUAL = (b"[", b"\\", b"\x7f", b"NaN", b"Inf")
PLAIN = {int, float, bool, type(None)}
LAST_EPOCH = 10**9
FLOATS = (-sys.float_info.max, sys.float_info.max)
# No type checker knows pyarrow's functions: they are made when it is imported.
call: Any = pyarrow.compute.call_function
_read: Any = pyarrow.json.read_json
_READING = pyarrow.json.ReadOptions(use_threads=False)
_PARSING = pyarrow.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore")


def table_of(content: bytes, left_out: list[str]) -> tuple[Any, int]:
    """A pyarrow table of SCHEMA, each epoch once and in order, and the number of lines that cannot be read. `left_out`
    gets a note for each value that does not fit its column, and the notes of `epoch_rows` on lines."""
    table = _at_once([content], [count]) if (count := _plain_lines(content)) else None
    if table is None:
        lines, broken = lines_of(content)
        return _one_by_one(lines, left_out), broken
    for place, column in enumerate(OWN):
        if not _fits(table[column.source], column):
            table = table.set_column(
                place, SCHEMA.field(place), [_fitted(table[column.source], column, content, left_out)]
            )
    return table, 0


def tables_of(contents: Sequence[bytes]) -> list[Any]:
    """Tables of many contents, parsed together, because pyarrow takes longer to start than to read a single one. A
    content that needs a note is None: `table_of` reads it."""
    counts = [_plain_lines(content) for content in contents]
    table = _at_once(list(compress(contents, counts)), list(filter(None, counts)))
    if table is None:
        return [None] * len(contents)
    starts = list(accumulate(counts, initial=0))
    odd = [_misfits(table[column.source], column) for column in OWN if not _fits(table[column.source], column)]
    left = set(np.searchsorted(starts, np.concatenate(odd), side="right") - 1) if odd else set[int]()
    return [table.slice(starts[n], count) if count and n not in left else None for n, count in enumerate(counts)]


def _fitted(values: Any, column: Column, content: bytes, left_out: list[str]) -> Any:
    """The values of the lines that `_at_once` has read, without those outside the column's range."""
    lines, cells = content.split(b"\n"), values.to_pylist()
    for n, value in enumerate(cells):
        if value is not None and fit(value, column, []) != value:
            line = _object(lines[n]) or {column.source: value}
            cells[n] = fit(line[column.source], column, left_out)  # the note has the digits of the record
    return pa.array(cells, TYPES[column.kind])


def _one_by_one(lines: Sequence[Object], left_out: list[str]) -> Any:
    if _in_order([line.get("epoch") for line in lines]):
        return pa.table([_cells(lines, column, left_out) for column in OWN], SCHEMA)
    return pa.Table.from_pylist(epoch_rows(lines, left_out), SCHEMA)


def _cells(lines: Sequence[Object], column: Column, left_out: list[str]) -> Any:
    return pa.array([fit(line.get(column.source), column, left_out) for line in lines], TYPES[column.kind])


def _in_order(numbers: Sequence[Any]) -> bool:
    """Whether every line has an epoch's number, and the numbers ascend, so that no line has to be sorted or left
    out."""
    if set(map(type, numbers)) != {int} or numbers[0] < 0 or numbers[-1] > LAST_EPOCH:
        return False
    return all(one < two for one, two in pairwise(numbers))


def lines_of(content: bytes) -> tuple[list[Object], int]:
    """The JSON objects, and the number of lines that are not one: a killed process may leave half a line."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    objects = _together(lines) or [_object(line) for line in lines]
    rows = [row for row in objects if row is not None]
    return rows, len(objects) - len(rows)


def _together(lines: Sequence[bytes]) -> list[Object] | None:
    """All lines parsed as one list, in a third of the time; None if a line is not a flat object of numbers."""
    try:
        objects = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    plain = len(objects) == len(lines) and {dict}.issuperset(map(type, objects))
    plain = plain and PLAIN.issuperset(map(type, chain.from_iterable(line.values() for line in objects)))
    return objects if plain else None


def _object(line: bytes) -> Object | None:
    try:
        return parse(line)
    except ValueError:
        return None


def _plain_lines(content: bytes) -> int:
    """The number of lines if every line has the harness's form (one flat object, no escapes in texts); else 0."""
    if not content.isascii() or any(text[:1] in content and text in content for text in UNUSUAL):  # one letter: faster
        return 0
    lines = content.split(b"\n")
    count = len(lines) - (not lines[-1])
    closed = all(line.startswith(b"{") and line.endswith(b"}") for line in lines[:count])
    return count if closed and content.count(b"{") == content.count(b"}") == count else 0


def _at_once(contents: Sequence[bytes], counts: Sequence[int]) -> Any:
    """The lines of all contents, parsed by pyarrow in a fiftieth of the time; None if a value is not of its column's
    kind or the epochs of a content do not ascend. counts: lines of each content"""
    if not contents:
        return NONE
    try:
        joined = b"".join(content if content.endswith(b"\n") else content + b"\n" for content in contents)
        table = _read(pa.BufferReader(joined), _READING, _PARSING)
    except pa.ArrowInvalid:
        return None
    starts = np.cumsum([0, *counts])
    if len(table) != starts[-1] or not _ascending(table["epoch"], starts[:-1]):
        return None
    return None if any(_has_minus_zero(table[column.source]) for column in OWN if column.kind == "float") else table


def _ascending(numbers: Any, starts: Any) -> bool:
    """Whether every row has the number of an epoch, and they ascend from each start on."""
    if numbers.null_count:
        return False
    epochs = numbers.to_numpy()
    rising = np.diff(epochs) > 0
    rising[starts[1:] - 1] = True
    return bool(rising.all()) and epochs[starts].min() >= 0 and epochs.max() <= LAST_EPOCH


def _fits(values: Any, column: Column) -> bool:
    """Whether all values fit the column as they are."""
    if column.kind == "bool" or values.null_count == len(values):
        return True
    if column.kind == "text":
        return call("max", [call("utf8_length", [values])]).as_py() <= LONGEST_NAME
    low, high = column.range or FLOATS
    ends = call("min_max", [values]).as_py()
    return low <= ends["min"] and ends["max"] <= high


def _misfits(values: Any, column: Column) -> Any:
    """Numbers of the rows that `_fits` refuses."""
    if column.kind == "text":
        misfits = call("greater", [call("utf8_length", [values]), pa.scalar(LONGEST_NAME)])
    else:
        low, high = column.range or FLOATS
        misfits = call("or", [call("less", [values, pa.scalar(low)]), call("greater", [values, pa.scalar(high)])])
    return np.flatnonzero(call("coalesce", [misfits, pa.scalar(False)]).to_numpy())


def _has_minus_zero(values: Any) -> bool:
    """Whether pyarrow has read an integer -0, which is 0, as -0.0."""
    ends = call("min_max", [values]).as_py()
    if ends["min"] is None or not ends["min"] <= 0 <= ends["max"]:
        return False
    numbers = values.to_numpy()
    return bool((np.signbit(numbers) & (numbers == 0)).any())
