"""The data dictionary: what each column of the tables means. `python -m ddlbench.record.schema` prints it as Markdown.

columns.toml, beside this file, holds the text of the page and the columns themselves, one line each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pyarrow as pa

from ddlbench.texts import markdown_table

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


def _columns(table: str) -> tuple[Column, ...]:
    """The columns of a table. The range of a column replaces that of its unit. Columns without a source have none."""
    columns: list[Column] = []
    for name, line in DICTIONARY[table].items():
        ends = line.get("range", RANGES.get(line["unit"])) if line["source"] else None
        given: dict[str, Any] = {**line, "range": tuple(ends) if ends else None}
        columns.append(Column(name=name, **given))
    return tuple(columns)


RUNS = _columns("runs")
EPOCHS = _columns("epochs")
STEPS = _columns("steps")
RANK_EPOCHS = _columns("rank_epochs")
SCALING = _columns("scaling")
BREAKDOWN = _columns("breakdown")
LEARNING = _columns("learning")
TARGETS = _columns("targets")


def markdown() -> str:
    """The whole dictionary as one Markdown page."""
    page, units = DICTIONARY["page"], {f"`{unit}`": f"{low:g} to {high:g}" for unit, (low, high) in RANGES.items()}
    words = (("over ranks", "meaning", RANKS), ("clock", "meaning", CLOCKS), ("unit", "values", units))
    parts = [page["head"], *("\n" + markdown_table(head, texts.items()) for *head, texts in words)]
    head = ("column", "kind", "unit", "meaning", "over ranks", "clock", "source")
    for name, table in page["tables"].items():
        rows = list[Sequence[str]]()
        for column in _columns(name):
            source = " or ".join(f"`{key}`" for key in column.source.split("|") if key)
            meaning = column.meaning
            if column.range and list(column.range) != RANGES.get(column.unit):
                meaning += "; {:g} to {:g}".format(*column.range)
            rows.append((f"`{column.name}`", column.kind, column.unit, meaning, column.ranks, column.clock, source))
        parts.append(f"\n## {table['file']}\n\n{table['rows']}\n\n{markdown_table(head, rows)}")
    return "".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
