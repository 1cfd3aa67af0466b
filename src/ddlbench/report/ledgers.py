"""Columns in which comparable runs must agree, and a warning where they differ."""

from __future__ import annotations

from collections.abc import Iterable

from ddlbench.report.merge import AttemptRow, comparison_id, group_by

# Columns of runs.csv that the framework must not change: what it starts from, how much it does, at which rates.
SHARED = ("weights_hash_start", "samples", "updates", "dropped_samples_per_epoch", "lr_first", "lr_last")


def differences(runs: Iterable[AttemptRow]) -> list[str]:
    """A sentence for each comparison, global batch and column with several values among the runs that ended ok."""
    ended = [run for run in runs if run.ok]
    groups = group_by(ended, lambda run: (comparison_id(run), run.row["global_batch"], run.row["epochs_done"]))
    return [text for group in groups.values() for column in SHARED if (text := _difference(group, column))]


def _difference(group: list[AttemptRow], column: str) -> str | None:
    known = [run for run in group if run.row[column] is not None]
    values = group_by(known, lambda run: run.row[column])
    if len(values) < 2:
        return None
    told = "; ".join(f"{_short(value)}: {', '.join(sorted(set(map(_name, runs))))}" for value, runs in values.items())
    row = known[0].row
    return f"not the same training: {row['model']}, global batch {row['global_batch']}, differs in {column} ({told})"


def _name(run: AttemptRow) -> str:
    return f"{run.row['framework']} on {run.row['gpus']}"


def _short(value: object) -> str:
    return str(value)[:12]
