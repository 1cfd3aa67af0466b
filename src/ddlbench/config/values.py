"""Checks of every value of the configuration, whatever its key: finite, bounded, printable; and values as texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from ddlbench.errors import UserError
from ddlbench.texts import printable, shortened

# Every library takes numbers below 2**31.
LARGEST_INTEGER = 2**31 - 1
LONGEST_TEXT = 3000  # a path has 4,096 bytes on Linux, and a run's folder comes below it
LONGEST_NAME = 60  # bytes: a file name has 255, and a run's folder joins three names
LONGEST_LIST = 1000
# Sizes whose products still fit into 64 bits, and counts of layers that a dry run builds within seconds.
LARGEST_SIZE = 2**20
LARGEST = {
    "model.n_layer": 1000,
    "model.layers": 1000,
    "model.convs": 1000,
    "model.image_size": 2**14,
    "data.vocab_size": LARGEST_SIZE,
    "loader.prefetch": 1000,  # batches in memory
    "train.timeout_s": 1_000_000,  # 11 days; sockets count milliseconds in 32 bits
}
MAY_BE_EMPTY = "cluster.notes"
EXPANDS_HOME = "data.stage_to"  # on the node that copies


def check_value(key: str, value: Any) -> None:
    """Raise UserError for a value that no key may have. `value`: plain data below `key` ("" for the top level)."""
    if isinstance(value, Mapping):
        for name, item in cast(Mapping[str, Any], value).items():
            check_value(f"{key}.{name}" if key else name, item)
    elif isinstance(value, list):
        items = cast(list[Any], value)
        if len(items) > LONGEST_LIST:
            raise UserError(f"{key} has {len(items)} entries: give at most {LONGEST_LIST}")
        for item in items:
            check_value(key, item)
    elif isinstance(value, str):
        name = key.rpartition(".")[2] == "name"
        size, longest = len(value.encode(errors="replace")), LONGEST_NAME if name else LONGEST_TEXT
        if not value.strip() and key != MAY_BE_EMPTY:
            raise UserError(f"{key}= is empty: give a value, null where the key may have none, or leave the key out")
        if size > longest:
            raise UserError(f"{key} has {size} bytes: give at most {longest}")
        if not value.isprintable():
            raise UserError(f"{key}={shown(value)} holds a control character: leave it out")
        if name and ("/" in value or ".." in value):
            raise UserError(f"{key}={value} names folders and rows of tables: it cannot hold / or ..")
        if value.startswith("~") and key != EXPANDS_HOME:
            raise UserError(f"{key}={value}: ~ is not replaced here: write $HOME instead of ~")
    elif isinstance(value, int | float):  # True and False too, which are always small enough
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value} is not a finite number: give a number, or null where the key may have none")
        default = LARGEST_SIZE if key.startswith("model.") else LARGEST_INTEGER
        largest = LARGEST.get(key, default if isinstance(value, int) else math.inf)
        if abs(value) > largest:
            raise UserError(f"{key}={shown(value)} is too large: give at most {largest}")


def shown(value: object, longest: int = 60) -> str:
    """A value as one short line of printable characters."""
    text = hex(value) if isinstance(value, int) and abs(value) > 2**64 else str(value)  # str() refuses huge integers
    return shortened(printable(text), longest)


def written(value: object) -> str:
    """A value as on a command line and in YAML."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
