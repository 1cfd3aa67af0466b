"""One metric over the epochs: of learning.csv for runs that ended ok, of epochs.csv for each other run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from ddlbench.results.tables.measurement import Measurement

FAILED_SHOWN = 8  # runs of a panel that did not end ok

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

    def shown(self, rows: Sequence[Measurement]) -> list[tuple[Measurement, Course]]:
        """The merged courses of a panel's rows."""
        return [(row, self.merged[row["learning"]]) for row in rows if row["learning"] in self.merged]

    def shown_failed(self, rows: Sequence[Measurement]) -> tuple[list[tuple[Measurement, Course]], int]:
        """The first few runs that did not end ok, and the number of further ones."""
        pairs = [(row, run) for row in rows for run in self.failed.get(row["learning"], [])]
        return pairs[:FAILED_SHOWN], max(0, len(pairs) - FAILED_SHOWN)


def courses_of(
    table: pd.DataFrame, epochs: pd.DataFrame, learning_of: Mapping[str, str | None], column: str, places: Sequence[str]
) -> Courses:
    """The courses of a metric.

    table:       of learning.csv
    epochs:      rows of epochs.csv with a value of the metric
    learning_of: the column `learning` of each measurement
    places:      columns that must be known: "epoch", "elapsed_s"
    """
    rows = table.dropna(subset=[column, *places]).sort_values("epoch")
    ends = {end: f"{column}_{end}" for end in ("min", "max", "low", "high")}
    plain = _floats(rows, learning="learning", seeds="seeds", runs="runs", value=column, **ends)
    ok = (epochs["status"] == "ok").to_numpy(bool)
    repeated = _of_repeats(plain, _floats(cast(pd.DataFrame, epochs[ok]), value=column), learning_of)
    merged = {
        str(name): _course(repeated.get(str(name), curve_rows), "value", "min", "max", "low", "high")
        for name, curve_rows in plain.groupby("learning", sort=False)
    }
    failed: dict[str, list[Course]] = {}
    others = _floats(cast(pd.DataFrame, epochs[~ok]), path="path", value=column)
    for key, run in others.groupby(["measurement", "path"]):
        name, _ = cast(tuple[str, str], key)
        failed.setdefault(str(learning_of[name]), []).append(_course(run, *["value"] * 3, "none", "none"))
    return Courses(merged, failed)


def _floats(table: pd.DataFrame, **columns: str) -> pd.DataFrame:
    """Columns as plain arrays, which are many times faster than masked ones: names as objects, the others as floats."""
    names = {"epoch": "epoch", "elapsed_s": "elapsed_s", **columns}
    if "learning" not in names:
        names["measurement"] = "measurement"
    texts = ("measurement", "learning", "path")
    arrays = {
        key: table[name].to_numpy(object) if key in texts else table[name].to_numpy("float64", na_value=np.nan)
        for key, name in names.items()
    }
    return pd.DataFrame(arrays | {"none": np.full(len(table), np.nan)})


def _of_repeats(
    plain: pd.DataFrame, epochs: pd.DataFrame, learning_of: Mapping[str, str | None]
) -> dict[str, pd.DataFrame]:
    """The rows of runs that have one seed in common, with the range of its repeats."""
    one = plain.groupby("learning")["seeds"].transform("max").eq(1) & plain["runs"].gt(1)
    single_seed = cast(pd.DataFrame, plain[one])
    if single_seed.empty:
        return {}
    runs = epochs.assign(learning=epochs["measurement"].map(cast(Any, dict(learning_of))))
    ranges = runs.groupby(["learning", "epoch"])["value"].agg(["min", "max"]).reset_index()
    joined = single_seed.drop(columns=["min", "max"]).merge(ranges, on=["learning", "epoch"], how="left")
    return {str(name): rows for name, rows in joined.groupby("learning", sort=False)}


def _course(rows: pd.DataFrame, *columns: str) -> Course:
    return Course(*(rows[name].to_numpy("float64") for name in ("epoch", "elapsed_s", *columns)))
