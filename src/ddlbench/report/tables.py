"""From attempts to tidy tables: runs, epochs, scaling. Pure functions; columns.toml says what each cell means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ddlbench.config import options
from ddlbench.record.fingerprint import fingerprint, noted
from ddlbench.record.schema import DEVELOPER, RUNS, SCALING, Column
from ddlbench.report.blocks import Block, block, epochs_table
from ddlbench.report.breakdown import breakdown
from ddlbench.report.cells import cell, fit, in_one_line
from ddlbench.report.copies import without_copies
from ddlbench.report.cores import over_cores
from ddlbench.report.doubts import drift, questions
from ddlbench.report.labels import settings_text
from ddlbench.report.ledgers import differences, environments, merged_though
from ddlbench.report.left_out import line as left_out_line
from ddlbench.report.merge import (
    AttemptRow,
    Row,
    digest,
    measured_options,
    measurement_id,
    measurements,
    quality_id,
)
from ddlbench.report.parquet_files import damaged
from ddlbench.report.quality import learning_table
from ddlbench.report.read import Attempt, Records, unreadable, why
from ddlbench.report.scaling import scaling_rows
from ddlbench.report.spreadsheets import write_csv

_GLOBAL_BATCH = next(column for column in RUNS if column.name == "global_batch")
DTYPES = {"text": "string", "int": "Int64", "float": "Float64", "bool": "boolean"}


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

    def write(self, folder: Path) -> None:
        """runs.csv, epochs.csv, scaling.csv, learning.csv, breakdown.csv; an unknown cell is empty."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {name: getattr(self, name) for name in ("runs", "epochs", "scaling", "learning")}
        for name, table in (tables | {"breakdown": breakdown(self.scaling)}).items():
            write_csv(table, folder / f"{name}.csv")


@dataclass(frozen=True)
class Rows:
    """What one attempt gives the tables."""

    run: AttemptRow
    epochs: Block
    warnings: list[str]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Merged:
    """Attempts in order, copies left out, and the groups of repeats."""

    rows: list[Rows]
    groups: list[list[AttemptRow]]
    copies: list[str]


def merge(found: Records, processes: int = 1) -> Merged:
    """All attempts, each with the name of its measurement. processes: that read the epochs"""
    attempts, copies = without_copies(found.attempts)
    rows = over_cores(_guarded, attempts, processes)
    groups = measurements(own.run for own in rows if own.run.options and own.run.row["backend"] != DEVELOPER)
    for group in groups:
        name = measurement_id(group)
        for run in group:
            run.row.update(measurement=name, learning=quality_id(run))
    return Merged(rows, groups, copies)


def make_tables(found: Records, by: str = "framework", processes: int = 1) -> Tables:
    """All tables of any number of attempts; by: the factor that rows of scaling.csv are compared by."""
    merged = merge(found, processes)
    runs = [own.run for own in merged.rows]
    scaling = scaling_rows(merged.groups, by)
    epochs = epochs_table([own.epochs for own in merged.rows])
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


def _guarded(attempt: Attempt) -> Rows:
    try:
        return _rows(attempt)
    except Exception as error:  # whatever one record holds, the others are reported
        return _rows(unreadable(attempt.path, f"the values of run.json cannot be used ({why(error)})"))


def _rows(attempt: Attempt) -> Rows:
    left_out: list[str] = []
    record = attempt.record
    asked = measured_options(_section(record, "config"), _section(record, "config_added_later"))
    found = record.get("environment")
    run = AttemptRow(run_row(attempt, left_out), asked, fingerprint(found), noted(found))
    lines, warning = attempt.read_epochs()
    epochs = block(run.row, lines, left_out)
    notes = [f"{attempt.name}: {in_one_line(left_out)}"] if left_out else []
    kinds = [attempt.left_out, "epochs.jsonl that cannot be read whole" if warning else None]
    warnings = [*attempt.own_warnings, *([warning] if warning else []), *notes, *damaged(attempt.path)]
    return Rows(run, epochs, warnings, tuple(filter(None, kinds)))


def run_row(attempt: Attempt, left_out: list[str]) -> Row:
    """One row of runs.csv, but for the column `measurement`, which takes all runs to know. `left_out` gets a note for
    each value that does not fit its column."""
    row = {column.name: _find(attempt.record, column, left_out) for column in RUNS if column.source}
    row["global_batch"] = row["global_batch"] or _asked_batch(attempt.record, row["gpus"], left_out)
    row["batch_per_gpu"] = _share(row["global_batch"], row["gpus"])
    row["micro_batch"] = row["micro_batch"] or cell(_share(row["replica_batch"], row["micro_batches"]), "int")
    row["model_changed"] = _model_changed(attempt.record)
    row["device_model"] = _device_model(attempt.record, row["device"])
    row["environment_id"] = digest(known) if (known := fingerprint(attempt.record.get("environment"))) else None
    row["staleness_max"] = _staleness_max(attempt.record)
    return row | {"measurement": None, "learning": None, "path": attempt.name}


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


def _find(record: Row, column: Column, left_out: list[str]) -> Any:
    """The first of the column's sources that is known."""
    for path in _paths(column.source):
        value = _dig(record, path)
        if value is not None and (found := fit(value, column, left_out)) is not None:
            return found
    return None


@cache
def _paths(source: str) -> tuple[tuple[str, ...], ...]:
    """ "a.b|c": the keys (a, b), else (c)."""
    return tuple(tuple(key.split(".")) for key in source.split("|"))


def _dig(record: Any, path: Sequence[str]) -> Any:
    for part in path:
        record = cast(Row, record).get(part) if isinstance(record, dict) else None
    return record


def _section(record: Row, key: str) -> Row:
    value = record.get(key)
    return cast(Row, value) if isinstance(value, dict) else {}


def _asked_batch(record: Row, gpus: int | None, left_out: list[str]) -> int | None:
    """The global batch of an attempt that failed before it wrote its ledger."""
    batch = cell(_dig(record, ("config", "train", "batch_per_gpu")), "int")
    return fit(batch * gpus, _GLOBAL_BATCH, left_out) if batch and gpus else None


def _share(whole: int | None, parts: int | None) -> float | None:
    return whole / parts if whole and parts else None


def _model_changed(record: Row) -> str | None:
    """As the record says; one of a version that did not say is compared with the model's published values."""
    found = _dig(record, ("model", "changed"))
    changed = (
        cast(Row, found) if isinstance(found, dict) else options.changed(_section(_section(record, "config"), "model"))
    )
    return cell(settings_text(dict(sorted(changed.items()))) or None, "text")


def _staleness_max(record: Row) -> int | None:
    """The framework says one number, or one for each stage."""
    said = _dig(record, ("framework", "staleness"))
    stages = [cell(value, "int") for value in (cast(list[Any], said) if isinstance(said, list) else [said])]
    return max((value for value in stages if value is not None and value >= 0), default=None)


def _device_model(record: Row, device: str | None) -> str | None:
    key = {"cuda": "gpu_model", "cpu": "cpu_model"}.get(device or "")
    return cell(_dig(record, ("environment", key)), "text") if key else None
