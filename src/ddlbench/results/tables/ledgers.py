"""Columns and environments in which comparable runs should agree, and a warning where they differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from ddlbench.record.fingerprint import of_the_launch
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.texts import first_few, shortened

# Columns of runs.csv that the framework must not change: what it starts from, how much it does, at which rates.
SHARED = ("weights_hash_start", "samples", "updates", "dropped_samples_per_epoch", "lr_first", "lr_last")
KEYS_SHOWN = 5
RUNS_SHOWN = 4
LONGEST_VALUE = 60  # letters; two names of a CPU may differ in the last ones


def differences(runs: Iterable[AttemptRow]) -> list[str]:
    """A sentence for each comparison, global batch and column with several values among the runs that ended ok."""
    ended = [run for run in runs if run.ok]
    groups = group_by(ended, lambda run: (run.comparison, run.row["global_batch"], run.row["epochs_done"]))
    return [text for group in groups.values() for column in SHARED if (text := _difference(group, column))]


def _difference(group: list[AttemptRow], column: str) -> str | None:
    recorded = [run for run in group if run.row[column] is not None]
    values = group_by(recorded, lambda run: run.row[column])
    if len(values) < 2:
        return None
    text = "; ".join(f"{_short(value)}: {', '.join(sorted(set(map(_name, runs))))}" for value, runs in values.items())
    row = recorded[0].row
    return f"not the same training: {row['model']}, global batch {row['global_batch']}, differs in {column} ({text})"


def _name(run: AttemptRow) -> str:
    return f"{run.row['framework']} on {run.row['gpus']}"


def _short(value: object) -> str:
    """The first letters of a hash; all digits of a number."""
    return value[:12] if isinstance(value, str) else str(value)


def environments(runs: Iterable[AttemptRow]) -> list[str]:
    """A sentence for each comparison whose runs that ended ok differ in versions, switches or the kind of host."""
    ended = [run for run in runs if run.ok and run.environment]
    sentences: list[str] = []
    for group in group_by(ended, lambda run: run.comparison).values():
        texts = _several(group, _around, _name)
        if texts:
            sentences.append(f"not the same environment: {group[0].row['model']}, differs in {texts}")
    return sentences


def _around(run: AttemptRow) -> Row:
    return {key: value for key, value in run.environment.items() if not of_the_launch(key)}


def merged_though(groups: Iterable[Sequence[AttemptRow]]) -> list[str]:
    """A sentence for each measurement whose repeats differ in something that does not separate them."""
    sentences: list[str] = []
    for group in groups:
        ended = [run for run in group if run.ok]
        texts = _several(ended, lambda run: run.noted, lambda run: f"repeat {run.row['repeat']}")
        if texts:
            sentences.append(f"repeats are merged: {_name(ended[0])}, {ended[0].row['model']}, differ in {texts}")
    return sentences


def _several(
    runs: Sequence[AttemptRow], values: Callable[[AttemptRow], Row], name: Callable[[AttemptRow], str]
) -> str | None:
    """The keys that have several values, and for each value the runs that have it."""
    by_run = [(run, values(run)) for run in runs]
    texts: list[str] = []
    for key in sorted({key for _, row in by_run for key in row}):
        pairs = [(row[key], run) for run, row in by_run if key in row]
        if all(value == pairs[0][0] for value, _ in pairs):
            continue
        groups = group_by(pairs, lambda pair: shortened(json.dumps(pair[0], default=str), LONGEST_VALUE))
        runs_of = {value: sorted({name(run) for _, run in group}) for value, group in groups.items()}
        text = "; ".join(f"{value}: {', '.join(first_few(named, RUNS_SHOWN))}" for value, named in runs_of.items())
        texts.append(f"{key} ({text})")
    return ", ".join(first_few(texts, KEYS_SHOWN)) or None
