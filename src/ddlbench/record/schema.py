"""The data dictionary: what each column of the tables means.

columns.toml, beside this file, holds the columns, one line each, and the text of docs/data-dictionary.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pyarrow as pa

DEVELOPER = "nccl (shared GPU)"  # the column `backend` where ranks shared a GPU: no measurement
# The version of run.json and the tables. It is raised when a key or a column changes its meaning; new keys do not raise
# it, because a record without them can be read. From version 2 on, `speedup` and `efficiency` are against the best
# single GPU.
SCHEMA_VERSION = 2
READ_VERSIONS = (1, 2)  # run.json of version 1 means the same: it lacks what was added
KINDS = {"text": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


@dataclass(frozen=True)
class Column:
    """One column of one table.

    kind:   "text" | "int" | "float" | "bool"
    unit:   SI or a counted thing; "1" for a share, "" where none applies
    source: where the value comes from; columns.toml says how to read it
    ranks:  how the ranks' values become one: a key of RANKS
    clock:  what was synchronized when the time was taken: a key of CLOCKS, "" for what is no time
    range:  the smallest and the largest value that a record may have; None: any
    """

    name: str
    kind: str
    unit: str
    source: str
    ranks: str
    clock: str
    meaning: str
    range: tuple[float, float] | None


def schema_of(columns: Iterable[Column]) -> Any:
    """The pyarrow schema of some columns."""
    return pa.schema([(column.name, KINDS[column.kind]) for column in columns])


DICTIONARY = tomllib.loads(files("ddlbench.record").joinpath("columns.toml").read_text(encoding="utf-8"))
RANKS: dict[str, str] = DICTIONARY["ranks"]
CLOCKS: dict[str, str] = DICTIONARY["clock"]
RANGES: dict[str, list[float]] = DICTIONARY["range"]


def columns_of(table: str) -> tuple[Column, ...]:
    """The columns of a table. The range of a column replaces that of its unit. Columns without a source have none."""
    columns: list[Column] = []
    for name, line in DICTIONARY[table].items():
        ends = line.get("range", RANGES.get(line["unit"])) if line["source"] else None
        given: dict[str, Any] = {**line, "range": tuple(ends) if ends else None}
        columns.append(Column(name=name, **given))
    return tuple(columns)


RUNS = columns_of("runs")
EPOCHS = columns_of("epochs")
STEPS = columns_of("steps")
RANK_EPOCHS = columns_of("rank_epochs")
SCALING = columns_of("scaling")
BREAKDOWN = columns_of("breakdown")
LEARNING = columns_of("learning")
TARGETS = columns_of("targets")
