"""What runs learn: loss and accuracy by epoch over seeds (learning.csv), and epochs, updates, samples and seconds until
a metric reaches a target (targets.csv).

Quality varies with the seed, time varies with the repeat. The repeats of one seed give one value, their median: they
are no further evidence on quality, because they are equal where a run is deterministic. The band over seeds is their
whole range and, from six seeds on, the interval of their median.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from ddlbench.errors import UserError
from ddlbench.record.schema import LEARNING, TARGETS, schema_of
from ddlbench.results.reading.cells import DTYPES, frame, plain
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.stats import confidence, median_interval

METRICS = ("train_loss", "val_loss", "val_top1", "val_top5", "val_perplexity_token")
RISING = ("val_top1", "val_top5")
FALLING = ("val_loss", "val_perplexity_token", "val_perplexity_word", "train_loss")
COSTS = ("epochs", "updates", "samples", "seconds")


def learning_table(epochs: pd.DataFrame, runs: Sequence[AttemptRow]) -> pd.DataFrame:
    """One row for each epoch of runs that ended ok and differ only in seed and repeat."""
    ended = {run.row["path"]: run.row for run in runs if run.ok and run.row["learning"]}
    values = plain(epochs, ["path"], ["epoch", "elapsed_s", *METRICS])
    values = values[values["path"].isin(list(ended))]
    if values.empty:
        return frame(LEARNING, [])
    for name in ("learning", "seed"):
        values[name] = values["path"].map({path: row[name] for path, row in ended.items()})
    groups = values.groupby(["learning", "epoch"], sort=False)
    of_seeds = values.groupby(["learning", "epoch", "seed"], sort=False, dropna=False)[list(METRICS)].median()
    seeds = of_seeds.groupby(level=["learning", "epoch"], sort=False)
    counts = {"runs": groups.size(), "seeds": seeds.size(), "elapsed_s": groups["elapsed_s"].median()}
    ranges = [seeds.median(), seeds.min().add_suffix("_min"), seeds.max().add_suffix("_max")]
    merged = pd.concat([pd.DataFrame(counts), *ranges], axis=1)
    for metric in METRICS:
        listed = of_seeds[metric].dropna().groupby(level=["learning", "epoch"], sort=False).agg(list)
        intervals = listed.map(median_interval).dropna()  # None where there are too few seeds
        for end in ("low", "high"):
            merged[f"{metric}_{end}"] = intervals.map(attrgetter(end)).astype(float)
    table = merged.reset_index()
    samples = {row["learning"]: row for row in reversed(list(ended.values()))}
    for name in (column.name for column in LEARNING if column.source == "equal"):
        table[name] = np.array([samples[learning][name] for learning in table["learning"]], object)
    typed = pa.Table.from_pandas(table, schema_of(LEARNING), preserve_index=False)
    return typed.to_pandas(types_mapper=DTYPES.get)


@dataclass(frozen=True)
class Target:
    """A metric of epochs.csv and the value that it has to reach."""

    metric: str
    value: float

    @property
    def text(self) -> str:
        return f"{self.metric}={self.value:g}"


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


def costs(epochs: pd.DataFrame, wanted: Target) -> pd.DataFrame:
    """What each attempt that reaches the target took: COSTS by its path, NaN where its record does not say it."""
    table = plain(epochs, ["path"], ["epoch", "updates", "samples", "elapsed_s", wanted.metric])
    table = table.rename(columns={"elapsed_s": "seconds"}).sort_values(["path", "epoch"], kind="stable")
    attempts = table.groupby("path")
    table["epochs"] = table["epoch"] + 1
    complete = table["epoch"] == attempts.cumcount()  # no earlier epoch is missing
    table["samples"] = attempts["samples"].cumsum(skipna=False).where(complete)
    course = table[wanted.metric].to_numpy()
    reached = course >= wanted.value if wanted.metric in RISING else course <= wanted.value
    return table[reached].drop_duplicates("path").set_index("path")[[*COSTS]].astype(float)


@dataclass(frozen=True)
class TargetCosts:
    """What it took to reach a target.

    rows:    of targets.csv: one for each measurement, and one for those that differ only in the seed
    by_path: what each attempt took that reached it: COSTS by its path, NaN where its record does not say it
    """

    target: Target
    rows: list[Row]
    by_path: pd.DataFrame


def target_costs(
    wanted: Target, epochs: pd.DataFrame, run_rows: Sequence[Row], reported: Iterable[Row] | None = None
) -> TargetCosts:
    """A row for each measurement with runs that ended ok and have the metric: medians over those runs and the ones that
    diverged. A row also for several measurements that differ only in the seed: medians over the seeds of these medians.

    run_rows: of runs.csv; reported: runs whose measurements get a row; None: all

    A run that never reaches the target or diverges counts as infinitely long. So a median is empty where fewer than
    half of its values reach the target.
    """
    epochs = epochs.loc[epochs["path"].isin([run["path"] for run in run_rows if run["status"] == "ok"])]
    by_path, measured = costs(epochs, wanted), set(epochs.dropna(subset=[wanted.metric])["path"])
    shown = {run["measurement"] for run in (run_rows if reported is None else reported)} - {None}
    counted = (run for run in run_rows if run["path"] in measured or run["status"] == "diverged")
    ended = [run for run in counted if run["measurement"] in shown]
    curves = {run["measurement"]: run["learning"] for run in ended if run["status"] == "ok"}
    equal = [column.name for column in TARGETS if column.source == "equal"]

    def merged(runs: Sequence[Row], taken: NDArray[np.float64], **others: Any) -> Row:
        reached = sum(run["path"] in by_path.index for run in runs)
        facts = {"target": wanted.text, **{name: runs[0][name] for name in equal}, **others}
        return {**facts, "runs": len(runs), "reached": reached, **_medians(taken)}

    rows = list[Row]()
    groups = group_by(ended, lambda run: curves.get(run["measurement"], run["learning"]))
    for runs in (groups[curve] for curve in dict.fromkeys(curves.values())):
        of_seeds = list[NDArray[np.float64]]()
        for repeats in group_by(runs, itemgetter("measurement")).values():
            taken = by_path.reindex([run["path"] for run in repeats], fill_value=inf).to_numpy()
            rows.append(merged(repeats, taken, seeds=1))
            of_seeds.append(np.median(taken, axis=0))
        if len(of_seeds) > 1:
            rows.append(merged(runs, np.array(of_seeds), seeds=len(of_seeds), seed=None, measurement=None))
    return TargetCosts(wanted, rows, by_path)


def _medians(taken: NDArray[np.float64]) -> Row:
    """The columns of the medians of [values, costs] and of their intervals. A median of which a value is not known is
    empty: that of the others would be a median of fewer."""
    row = Row()
    for name, values in zip(COSTS, taken.T, strict=True):
        interval = None if np.isnan(values).any() else median_interval(values.tolist())
        low, high = (interval.low, interval.high) if interval else (inf, inf)
        for column, value in {"to_target": np.median(values), "low": low, "high": high}.items():
            row[f"{name}_{column}"] = float(value) if isfinite(value) else None
    return row | {"interval": confidence(len(taken), median_interval(taken[:, 0].tolist()))}  # epochs are known
