"""From attempts to tidy tables: runs, epochs, scaling. Pure functions; columns.toml says what each cell means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from ddlbench.record.schema import DEVELOPER, RUNS, SCALING, Column
from ddlbench.results.reading.attempts import Records
from ddlbench.results.reading.columns import array, epochs_table
from ddlbench.results.reading.copies import without_copies
from ddlbench.results.reading.left_out import NO_RATE
from ddlbench.results.reading.left_out import line as left_out_line
from ddlbench.results.rows import Row
from ddlbench.results.tables.breakdown import breakdown
from ddlbench.results.tables.csv_files import write_csv
from ddlbench.results.tables.drift import drift, questions
from ddlbench.results.tables.labels import axes_shown, marked
from ddlbench.results.tables.ledgers import differences, environments, merged_though
from ddlbench.results.tables.marks import numbered
from ddlbench.results.tables.merge import AttemptRow, measurement_id, measurements, quality_id
from ddlbench.results.tables.quality import learning_table
from ddlbench.results.tables.run_rows import Rows, read_rows
from ddlbench.results.tables.scaling import scaling_rows


@dataclass(frozen=True)
class Tables:
    """The tables of a report, and warnings about records that could not be used completely."""

    runs: pd.DataFrame
    epochs: pd.DataFrame
    scaling: pd.DataFrame
    learning: pd.DataFrame
    warnings: list[str]
    drift: str | None = None  # over the campaign, in words
    left_out: str | None = None  # counts of what is not in the numbers, in words

    @cached_property
    def run_rows(self) -> list[Row]:
        """runs.csv as plain objects."""
        return records(self.runs)

    @cached_property
    def measurement_rows(self) -> list[Row]:
        """scaling.csv as plain objects."""
        return records(self.scaling)

    @cached_property
    def shown_rows(self) -> list[Row]:
        """The rows of scaling.csv as a reader sees them: models marked, with `mark` and `axes`."""
        return axes_shown(numbered(marked(self.measurement_rows, self.run_rows)))

    def write(self, folder: Path) -> None:
        """runs.csv, epochs.csv, scaling.csv, learning.csv, breakdown.csv; an unknown cell is empty."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {name: getattr(self, name) for name in ("runs", "epochs", "scaling", "learning")}
        for name, table in (tables | {"breakdown": breakdown(self.scaling)}).items():
            write_csv(table, folder / f"{name}.csv")


@dataclass(frozen=True)
class Merged:
    """The attempts in order, without copies, and the groups of repeats."""

    rows: list[Rows]
    groups: list[list[AttemptRow]]
    copies: list[str]


def merge(records: Records) -> Merged:
    """All attempts, each with the name of its measurement."""
    rows = list(map(read_rows, records.folders))
    kept, copies = without_copies([attempt.original for attempt in rows])
    if copies:
        rows = [attempt for attempt in rows if attempt.original in kept]
    groups = measurements(
        attempt.run for attempt in rows if attempt.run.options and attempt.run.row["backend"] != DEVELOPER
    )
    for group in groups:
        name, quality = measurement_id(group), quality_id(group[0])
        for run in group:
            alike = run.ok and group[0].ok  # these agree in all that a quality_id is made of
            run.row.update(measurement=name, learning=quality if alike else quality_id(run))
    return Merged(rows, groups, copies)


def make_tables(records: Records, by: str = "framework") -> Tables:
    """All tables of any number of attempts; by: the factor that rows of scaling.csv are compared by."""
    merged = merge(records)
    runs = [attempt.run for attempt in merged.rows]
    scaling = scaling_rows(merged.groups, by)
    epochs = epochs_table([run.row for run in runs], [attempt.epochs for attempt in merged.rows])
    shared = [run.row["path"] for run in runs if run.row["backend"] == DEVELOPER]
    unused, left_out = not_used(records, merged)
    return Tables(
        runs=frame(RUNS, (run.row for run in runs)),
        epochs=epochs,
        scaling=frame(SCALING, scaling),
        learning=learning_table(epochs, runs),
        warnings=[
            *unused,
            *differences(runs),
            *environments(runs),
            *merged_though(merged.groups),
            *questions(scaling),
            *(f"{run.row['path']}: {run.row['ranks_differ']}" for run in runs if run.row["ranks_differ"]),
            *(f"{path}: ranks shared a GPU (backend=cuda:gloo): not in the scaling table" for path in shared),
        ],
        drift=drift(merged.groups),
        left_out=left_out,
    )


def not_used(records: Records, merged: Merged) -> tuple[list[str], str | None]:
    """A warning for each folder, file, copy and value that is not in the numbers, and one line with their counts."""
    warnings = [
        *records.warnings,
        *merged.copies,
        *(warning for attempt in merged.rows for warning in attempt.warnings),
    ]
    runs = [attempt.run.row for attempt in merged.rows]
    measured = [row for row in runs if row["status"] == "ok" and row["measurement"] is not None]
    kinds = [
        *records.left_out,
        *("copy" for _ in merged.copies),
        *(kind for attempt in merged.rows for kind in attempt.left_out),
        *(NO_RATE for row in measured if row["throughput_samples_per_s"] is None),
        *("still running or killed" for row in runs if row["status"] == "running"),
        *("of ranks that shared a GPU" for row in runs if row["backend"] == DEVELOPER),
    ]
    return warnings, left_out_line(kinds)


def frame(columns: Sequence[Column], rows: Iterable[Row]) -> pd.DataFrame:
    """A table with the columns' order and types; what a row does not have is missing."""
    listed = list(rows)
    cells = {column.name: [row.get(column.name) for row in listed] for column in columns}
    return pd.DataFrame({column.name: array(cells[column.name], column.kind) for column in columns})


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a table as plain objects, None for what is missing."""
    names = [str(name) for name in table]
    columns = [
        table[name].to_numpy(object, na_value=None).tolist() for name in names
    ]  # `to_dict` takes ten times as long
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
