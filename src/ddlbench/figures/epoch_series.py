"""One metric over the epochs: of learning.csv for runs that ended ok, of epochs.csv for each other run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlbench.results.frames import plain
from ddlbench.results.tables.measurement import Measurement

FAILED_SHOWN = 8  # runs of a panel that did not end ok
PLACES = ("epoch", "elapsed_s")  # columns: when a value was reached

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Course:
    """One metric over the epochs: of runs that differ in seed and repeat alone, or of one run (middle = low = high).

    epoch, elapsed_s:        when the values were reached; elapsed_s is the median of the runs
    middle, low, high:       the median over seeds and their range; with one seed the range of its repeats
    inner_low, inner_high:   the interval of the median, from six seeds on; else NaN
    """

    epoch: Floats
    elapsed_s: Floats
    middle: Floats
    low: Floats
    high: Floats
    inner_low: Floats
    inner_high: Floats


@dataclass(frozen=True)
class Courses:
    """One metric of all measurements.

    Both by the column `learning`:
    merged: one course for the runs that ended ok
    failed: one course for each other run
    """

    merged: dict[str, Course]
    failed: dict[str, list[Course]]

    def shown(self, rows: Sequence[Measurement]) -> Shown:
        """The courses of a panel's rows."""
        merged = [(row, self.merged[row["learning"]]) for row in rows if row["learning"] in self.merged]
        failed = [(row, run) for row in rows for run in self.failed.get(row["learning"], [])]
        return Shown(merged, failed[:FAILED_SHOWN], max(0, len(failed) - FAILED_SHOWN))


class Shown(NamedTuple):
    """The merged courses of a panel, the first few runs that did not end ok, and the number of further ones."""

    merged: list[tuple[Measurement, Course]]
    failed: list[tuple[Measurement, Course]]
    more: int


def courses_of(
    table: pd.DataFrame, epochs: pd.DataFrame, learning_of: Mapping[str, str | None], column: str, places: Sequence[str]
) -> Courses:
    """The courses of a metric.

    table:       of learning.csv
    epochs:      rows of epochs.csv with a value of the metric
    learning_of: the column `learning` of each measurement
    places:      columns that must be known: "epoch", "elapsed_s"
    """
    low, high, *interval = (f"{column}_{end}" for end in ("min", "max", "low", "high"))
    rows = table.dropna(subset=[column, *places]).sort_values("epoch")
    curves = plain(rows, ["learning"], [*PLACES, "seeds", "runs", column, low, high, *interval])
    runs = plain(epochs, ["measurement", "path", "status"], [*PLACES, column])
    runs["learning"] = runs["measurement"].map(dict(learning_of)).astype(object)  # also without rows
    ok = runs["status"] == "ok"
    # A curve of one seed has the range of its repeats.
    one = curves.groupby("learning")["seeds"].transform("max").eq(1) & curves["runs"].gt(1)
    ranges = runs[ok].groupby(["learning", "epoch"])[column].agg(["min", "max"])
    curves.loc[one, [low, high]] = curves[one].join(ranges, on=["learning", "epoch"])[["min", "max"]].to_numpy()
    names = [*PLACES, column, low, high, *interval]
    merged = {str(name): Course(*curve[names].to_numpy().T) for name, curve in curves.groupby("learning", sort=False)}
    names = [*PLACES, *[column] * 3, "none", "none"]
    failed: dict[str, list[Course]] = {}
    for (name, _), run in runs[~ok].assign(none=np.nan).groupby(["measurement", "path"]):
        failed.setdefault(str(learning_of[name]), []).append(Course(*run[names].to_numpy().T))
    return Courses(merged, failed)
