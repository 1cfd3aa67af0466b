"""From attempts to tidy tables: runs, epochs, scaling. Pure functions; columns.toml says what each cell means."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ddlbench.results.ledgers import differences
from ddlbench.results.merge import DEVELOPER, Row, Run, measured_options, measurement_id, measurements
from ddlbench.results.read import Attempt
from ddlbench.results.scaling import scaling_rows
from ddlbench.results.schema import EPOCHS, RUNS, SCALING, Column

DTYPES = {"text": "string", "int": "Int64", "float": "Float64", "bool": "boolean"}


@dataclass(frozen=True)
class Tables:
    """The three tables of a report, and what the reader must know about records that could not be used whole."""

    runs: pd.DataFrame
    epochs: pd.DataFrame
    scaling: pd.DataFrame
    warnings: list[str]

    def write(self, folder: Path) -> None:
        """runs.csv, epochs.csv, scaling.csv; an unknown cell is empty."""
        folder.mkdir(parents=True, exist_ok=True)
        self.runs.to_csv(folder / "runs.csv", index=False)
        self.epochs.to_csv(folder / "epochs.csv", index=False)
        self.scaling.to_csv(folder / "scaling.csv", index=False)


def make_tables(attempts: Sequence[Attempt]) -> Tables:
    """All tables of any number of attempts."""
    runs = [Run(run_row(attempt), measured_options(_section(attempt.record, "config"))) for attempt in attempts]
    shared = [run for run in runs if run.row["backend"] == DEVELOPER]
    groups = measurements(run for run in runs if run.options and run.row["backend"] != DEVELOPER)
    for group in groups:
        name = measurement_id(group)
        for run in group:
            run.row["measurement"] = name
    epochs = [row for attempt, run in zip(attempts, runs, strict=True) for row in epoch_rows(attempt, run.row)]
    return Tables(
        runs=frame(RUNS, (run.row for run in runs)),
        epochs=frame(EPOCHS, epochs),
        scaling=frame(SCALING, scaling_rows(groups)),
        warnings=[
            *(attempt.warning for attempt in attempts if attempt.warning),
            *differences(runs),
            *(f"{run.row['path']}: ranks shared a GPU (backend=cuda:gloo): not in the scaling table" for run in shared),
        ],
    )


def run_row(attempt: Attempt) -> Row:
    """One row of runs.csv, but for the column `measurement`, which takes all runs to know."""
    row = {column.name: _find(attempt.record, column) for column in RUNS if column.source}
    row["global_batch"] = row["global_batch"] or _asked_batch(attempt.record, row["gpus"])
    row["batch_per_gpu"] = _share(row["global_batch"], row["gpus"])
    row["micro_batch"] = row["micro_batch"] or cell(_share(row["replica_batch"], row["micro_batches"]), "int")
    row["device_model"] = _device_model(attempt.record, row["device"])
    return row | {"measurement": None, "path": str(attempt.path)}


def epoch_rows(attempt: Attempt, run: Row) -> list[Row]:
    """The rows of epochs.csv of one attempt, given its row of runs.csv."""
    return [
        {
            column.name: run[column.name] if column.source == "run" else cell(line.get(column.source), column.kind)
            for column in EPOCHS
        }
        for line in attempt.epochs
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
    rows = cast(list[Row], table.to_dict("records"))
    return [{name: None if value is pd.NA else value for name, value in row.items()} for row in rows]


def cell(value: Any, kind: str) -> Any:
    """A value of JSON as a table's cell; None for what does not fit the column: unknown, never 0."""
    if value is None or value == {} or value == []:
        return None
    if kind == "text":
        return _text(value)
    if kind == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, list):  # names, where the table counts
        return len(cast(list[Any], value))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if kind == "float" else int(value) if value == int(value) else None


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in cast(list[Any], value))
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)


def _find(record: Row, column: Column) -> Any:
    """The first of the column's sources that is known."""
    values = (cell(_dig(record, key), column.kind) for key in column.source.split("|"))
    return next((value for value in values if value is not None), None)


def _dig(record: Any, key: str) -> Any:
    for part in key.split("."):
        record = cast(Row, record).get(part) if isinstance(record, dict) else None
    return record


def _section(record: Row, key: str) -> Row:
    value = record.get(key)
    return cast(Row, value) if isinstance(value, dict) else {}


def _asked_batch(record: Row, gpus: int | None) -> int | None:
    """The global batch of an attempt that failed before it wrote its ledger."""
    batch = cell(_dig(record, "config.train.batch_per_gpu"), "int")
    return batch * gpus if batch and gpus else None


def _share(whole: int | None, parts: int | None) -> float | None:
    return whole / parts if whole and parts else None


def _device_model(record: Row, device: str | None) -> str | None:
    key = {"cuda": "gpu_model", "cpu": "cpu_model"}.get(device or "")
    return cell(_dig(record, f"environment.{key}"), "text") if key else None
