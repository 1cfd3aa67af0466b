"""From attempts to tidy tables: runs, epochs, scaling. Pure functions; columns.toml says what each cell means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ddlbench.record.schema import DEVELOPER, RUNS, SCALING, Column
from ddlbench.report.blocks import epochs_table
from ddlbench.report.breakdown import breakdown
from ddlbench.report.copies import without_copies
from ddlbench.report.cores import over_cores
from ddlbench.report.doubts import drift, questions
from ddlbench.report.ledgers import differences, environments, merged_though
from ddlbench.report.left_out import line as left_out_line
from ddlbench.report.merge import AttemptRow, Row, measurement_id, measurements, quality_id
from ddlbench.report.quality import learning_table
from ddlbench.report.read import Records
from ddlbench.report.rows import Rows, read_part
from ddlbench.report.scaling import scaling_rows
from ddlbench.report.spreadsheets import write_csv

DTYPES = {"text": "string", "int": "Int64", "float": "Float64", "bool": "boolean"}
FEW = 1_000  # attempts that are read before other processes have started


@dataclass(frozen=True)
class Tables:
    """The tables of a report, and what the reader must know about records that could not be used whole."""

    runs: pd.DataFrame
    epochs: pd.DataFrame
    scaling: pd.DataFrame
    learning: pd.DataFrame
    warnings: list[str]
    drift: str | None = None  # over the campaign, in words
    left_out: str | None = None  # what of the folders is not in the numbers, counted in words

    @cached_property
    def run_rows(self) -> list[Row]:
        """runs.csv as plain objects."""
        return records(self.runs)

    @cached_property
    def measurement_rows(self) -> list[Row]:
        """scaling.csv as plain objects."""
        return records(self.scaling)

    def write(self, folder: Path, threads: int = 1) -> None:
        """runs.csv, epochs.csv, scaling.csv, learning.csv, breakdown.csv; an unknown cell is empty."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {name: getattr(self, name) for name in ("runs", "epochs", "scaling", "learning")}
        for name, table in (tables | {"breakdown": breakdown(self.scaling)}).items():
            write_csv(table, folder / f"{name}.csv", threads)


@dataclass(frozen=True)
class Merged:
    """Attempts in order, copies left out, and the groups of repeats. epochs: a pyarrow table of each attempt"""

    rows: list[Rows]
    epochs: list[Any]
    groups: list[list[AttemptRow]]
    copies: list[str]


def merge(found: Records, processes: int = 1) -> Merged:
    """All attempts, each with the name of its measurement. processes: that read them"""
    parts = over_cores(read_part, found.folders, processes, FEW)
    each = {own.original.path: (own, epochs) for part in parts for own, epochs in part.each()}
    kept, copies = without_copies([own.original for own, _ in each.values()])
    rows = [each[original.path][0] for original in kept]
    epochs = [each[original.path][1] for original in kept]
    groups = measurements(own.run for own in rows if own.run.options and own.run.row["backend"] != DEVELOPER)
    for group in groups:
        name, quality = measurement_id(group), quality_id(group[0])
        for run in group:
            alike = run.ok and group[0].ok  # these agree in all that a quality_id is made of
            run.row.update(measurement=name, learning=quality if alike else quality_id(run))
    return Merged(rows, epochs, groups, copies)


def make_tables(found: Records, by: str = "framework", processes: int = 1) -> Tables:
    """All tables of any number of attempts; by: the factor that rows of scaling.csv are compared by."""
    merged = merge(found, processes)
    runs = [own.run for own in merged.rows]
    scaling = scaling_rows(merged.groups, by)
    epochs = epochs_table([run.row for run in runs], merged.epochs)
    shared = [run.row["path"] for run in runs if run.row["backend"] == DEVELOPER]
    return Tables(
        runs=frame(RUNS, (run.row for run in runs)),
        epochs=epochs,
        scaling=frame(SCALING, scaling),
        learning=learning_table(epochs, runs),
        warnings=[
            *found.warnings,
            *merged.copies,
            *(warning for own in merged.rows for warning in own.warnings),
            *differences(runs),
            *environments(runs),
            *merged_though(merged.groups),
            *questions(scaling),
            *(f"{run.row['path']}: {run.row['ranks_differ']}" for run in runs if run.row["ranks_differ"]),
            *(f"{path}: ranks shared a GPU (backend=cuda:gloo): not in the scaling table" for path in shared),
        ],
        drift=drift(merged.groups),
        left_out=left_out_line(_kinds(found, merged)),
    )


def _kinds(found: Records, merged: Merged) -> list[str]:
    """Of each attempt, copy, file and folder that is left out of the numbers, in the words of left_out.py."""
    runs = [own.run.row for own in merged.rows]
    return [
        *found.left_out,
        *("copy" for _ in merged.copies),
        *(kind for own in merged.rows for kind in own.left_out),
        *("still running or killed" for row in runs if row["status"] == "running"),
        *("of ranks that shared a GPU" for row in runs if row["backend"] == DEVELOPER),
    ]


def frame(columns: Sequence[Column], rows: Iterable[Row]) -> pd.DataFrame:
    """A table with the columns' order and types; what a row does not have is missing."""
    listed = list(rows)
    return pd.DataFrame(
        {
            column.name: pd.array([row.get(column.name) for row in listed], dtype=cast(Any, DTYPES[column.kind]))
            for column in columns
        }
    )


def records(table: pd.DataFrame) -> list[Row]:
    """The rows of a table as plain objects, None for what is missing."""
    names = [str(name) for name in table]
    columns = [
        table[name].to_numpy(object, na_value=None).tolist() for name in names
    ]  # `to_dict` takes ten times as long
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
