"""epochs.jsonl, a JSON object for each epoch, as a table: whole columns, not a Python object for each cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.json

from ddlbench.record.schema import Column
from ddlbench.report.cells import LONGEST_NAME, fit
from ddlbench.report.epochs import OWN, epoch_rows
from ddlbench.report.files import Object, parse

TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
SCHEMA = pa.schema([(column.source, TYPES[column.kind]) for column in OWN])
NONE: Any = SCHEMA.empty_table()
# A list, an escape, a character that does not print, what pyarrow takes for a number, and 0 with a sign.
UNUSUAL = (b"[", b"\\", b"\x7f", b"NaN", b"Inf", b":-0", b": -0")
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
    gets a note for each value that does not fit its column, and what `epoch_rows` says of lines."""
    table = _at_once(content)
    if table is None:
        lines, broken = lines_of(content)
        return _one_by_one(lines, left_out), broken
    for place, own in enumerate(OWN):
        if not _fits(table[own.source], own):
            table = table.set_column(place, SCHEMA.field(place), [_fitted(table[own.source], own, content, left_out)])
    return table, 0


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
        return pa.table([_cells(lines, own, left_out) for own in OWN], SCHEMA)
    return pa.Table.from_pylist(epoch_rows(lines, left_out), SCHEMA)


def _cells(lines: Sequence[Object], column: Column, left_out: list[str]) -> Any:
    return pa.array([fit(line.get(column.source), column, left_out) for line in lines], TYPES[column.kind])


def _in_order(numbers: Sequence[Any]) -> bool:
    """Whether every line has a number of its own, and they ascend: nothing to sort or to leave out."""
    if set(map(type, numbers)) != {int} or numbers[0] < 0 or numbers[-1] > LAST_EPOCH:
        return False
    return all(one < two for one, two in pairwise(numbers))


def lines_of(content: bytes) -> tuple[list[Object], int]:
    """The objects, and the number of lines that are none: a killed process may leave half a line."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    found = _together(lines) or [_object(line) for line in lines]
    rows = [row for row in found if row is not None]
    return rows, len(found) - len(rows)


def _together(lines: Sequence[bytes]) -> list[Object] | None:
    """All lines as one list, which takes a third of the time; None where one is no flat object of numbers."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    plain = len(found) == len(lines) and {dict}.issuperset(map(type, found))
    plain = plain and PLAIN.issuperset(map(type, chain.from_iterable(line.values() for line in found)))
    return found if plain else None


def _object(line: bytes) -> Object | None:
    try:
        return parse(line)
    except ValueError:
        return None


def _at_once(content: bytes) -> Any:
    """All lines by pyarrow, in a fiftieth of the time; None where one is not as the harness writes it: one flat object
    with values of the columns' kinds, its epoch after that of the line before."""
    lines = content.removesuffix(b"\n")
    counts = {lines.count(b"}\n{") + 1, lines.count(b"\n") + 1, lines.count(b"{"), lines.count(b"}")}
    whole = lines.startswith(b"{") and lines.endswith(b"}") and len(counts) == 1
    if not whole or not lines.isascii() or any(text in lines for text in UNUSUAL):
        return None
    try:
        table = _read(pa.BufferReader(lines), _READING, _PARSING)
    except pa.ArrowInvalid:
        return None
    return table if _ascending(table["epoch"]) else None


def _ascending(numbers: Any) -> bool:
    if numbers.null_count:
        return False
    found = numbers.to_numpy()
    return found[0] >= 0 and found[-1] <= LAST_EPOCH and bool((np.diff(found) > 0).all())


def _fits(values: Any, column: Column) -> bool:
    """Whether all values that are known can be cells as they are."""
    if column.kind == "bool" or values.null_count == len(values):
        return True
    if column.kind == "text":
        return call("max", [call("utf8_length", [values])]).as_py() <= LONGEST_NAME
    low, high = column.range or FLOATS
    ends = call("min_max", [values]).as_py()
    return low <= ends["min"] and ends["max"] <= high
