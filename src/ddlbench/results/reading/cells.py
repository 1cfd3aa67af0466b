"""A value of JSON becomes a cell of a table; what does not fit its column is left out and noted, never guessed."""

from __future__ import annotations

import json
import math
from typing import Any, cast

from ddlbench.record.schema import Column
from ddlbench.texts import shortened

LONGEST_NAME = 120  # letters of a cell
LONGEST_TEXT = 10_000  # of those that hold sentences, lists or JSON
LARGEST_INT = 2**63 - 1

_BY_STAGE = ("memory_allocated_by_stage_bytes", "memory_host_by_stage_bytes")
_TEXTS = ("reason", "hosts", "framework_facts", "loader_facts", "throttle_reasons", "marks", *_BY_STAGE)
_NOTHING: tuple[Any, ...] = (None, {}, [])
_NOUNS = {"int": "a whole number of 64 bits", "float": "a finite number", "bool": "true or false"}


def fit(value: Any, column: Column, left_out: list[str]) -> Any:
    """The cell, or None with a note in `left_out` if the value does not fit the column."""
    fitting, reason = cell(value, column.kind), None
    if fitting is None:
        reason = None if value in _NOTHING else f"not {_NOUNS[column.kind]}"
    elif column.range and not column.range[0] <= fitting <= column.range[1]:
        reason = f"must lie in {column.allowed}"
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        return None
    if kind == "float" or not math.isfinite(number):
        return number if math.isfinite(number) else None
    return int(value) if value == int(value) and abs(int(value)) <= LARGEST_INT else None
