"""Statistical efficiency: epochs, updates, samples and seconds until a validation metric reaches a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from ddlbench.errors import UserError
from ddlbench.record.schema import TARGETS
from ddlbench.results.reading.cells import frame, plain
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.stats import confidence, median_interval
from ddlbench.results.tables.tables import Tables, write_csv

RISING = ("val_top1", "val_top5")
FALLING = ("val_loss", "val_perplexity_token", "val_perplexity_word", "train_loss")
COSTS = ("epochs", "updates", "samples", "seconds")
_NAMES = tuple(column.name for column in TARGETS if column.source == "equal")


@dataclass(frozen=True)
class Target:
    """A metric of epochs.csv and the value that it has to reach."""

    metric: str
    value: float

    @property
    def text(self) -> str:
        return f"{self.metric}={self.value:g}"

    def reached(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return values >= self.value if self.metric in RISING else values <= self.value


def target(text: str) -> Target:
    """ "val_top1=0.7". UserError for anything else."""
    metric, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = inf
    if metric not in (*RISING, *FALLING) or not isfinite(value):
        raise UserError(f"--target {text!r}: write METRIC=NUMBER with a metric of {', '.join((*RISING, *FALLING))}")
    largest = 1 if metric in RISING else inf
    if not 0 < value <= largest:
        raise UserError(f"--target {text!r}: {metric} is above 0{' and at most 1' * (largest == 1)}")
    return Target(metric, value)


def costs(epochs: pd.DataFrame, wanted: Target) -> dict[str, dict[str, float | None]]:
    """For each attempt, by its path, what it took to reach the target; without a value where the record does not say.
    Attempts that never reach it are left out."""
    table = plain(epochs, ["path"], ["epoch", "updates", "samples", "elapsed_s", wanted.metric])
    table = table.rename(columns={"elapsed_s": "seconds"}).sort_values(["path", "epoch"], kind="stable")
    attempts = table.groupby("path")
    table["epochs"] = table["epoch"] + 1
    complete = table["epoch"] == attempts.cumcount()  # no earlier epoch is missing
    table["samples"] = attempts["samples"].cumsum(skipna=False).where(complete)
    reached = wanted.reached(table[wanted.metric].to_numpy())
    by_path: dict[str, dict[str, float | None]] = {}
    for path, *cells in table.loc[reached, ["path", *COSTS]].itertuples(index=False, name=None):
        values = [None if np.isnan(cell) else float(cell) for cell in cells]
        by_path.setdefault(str(path), dict(zip(COSTS, values, strict=True)))
    return by_path


@dataclass(frozen=True)
class TargetCosts:
    """What it took to reach a target.

    rows:    of targets.csv, one for each measurement
    by_path: of each attempt that reached it, by its path; None for what its record does not say
    """

    target: Target
    rows: list[Row]
    by_path: dict[str, dict[str, float | None]]


def target_costs(tables: Tables, wanted: Target, reported: Tables | None = None) -> TargetCosts:
    """A row for each measurement with runs that ended ok and have the metric: medians over those runs. reported: a part
    of the tables, whose measurements alone have a row

    A run that never reaches the target counts as infinitely long, so that half of the runs decide the median; it is
    empty where fewer reach the target.
    """
    by_path = costs(tables.epochs, wanted)
    measured = set(tables.epochs.dropna(subset=[wanted.metric])["path"])
    runs = [run for run in tables.run_rows if run["status"] == "ok" and run["path"] in measured]
    shown = {run["measurement"] for run in (reported or tables).run_rows} - {None}
    rows = list[Row]()
    for repeats in group_by((run for run in runs if run["measurement"] in shown), itemgetter("measurement")).values():
        taken = [by_path.get(run["path"], dict.fromkeys(COSTS, inf)) for run in repeats]
        row: Row = {"target": wanted.text, **{name: repeats[0][name] for name in _NAMES}}
        row |= {"runs": len(repeats), "reached": sum(run["path"] in by_path for run in repeats)}
        for name in COSTS:
            values = [value for cost in taken if (value := cost[name]) is not None]
            interval = median_interval(values)
            ends = {"low": interval.low, "high": interval.high} if interval else {"low": inf, "high": inf}
            for column, value in {"to_target": median(values) if values else inf, **ends}.items():
                row[f"{name}_{column}"] = value if isfinite(value) else None
        epochs = median_interval([cost["epochs"] or inf for cost in taken])
        rows.append(row | {"interval": confidence(len(repeats), epochs)})
    return TargetCosts(wanted, rows, by_path)


def write_targets(targets: Sequence[TargetCosts], folder: Path) -> None:
    """targets.csv, where there are targets; that of an earlier report is removed."""
    (folder / "targets.csv").unlink(missing_ok=True)
    if rows := [row for target in targets for row in target.rows]:
        write_csv(frame(TARGETS, rows), folder / "targets.csv")
