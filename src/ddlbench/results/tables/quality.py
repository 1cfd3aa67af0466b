"""learning.csv: loss and accuracy by epoch, over seeds. Quality varies with the seed, time with the repeat.

Repeats of one seed give one value, their median: where a run is deterministic they are equal, and they are no further
evidence on quality. The band over seeds is their whole range and, from six seeds on, the interval of their median.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ddlbench.record.schema import LEARNING, schema_of
from ddlbench.results.reading.cells import frame, plain, typed
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.stats import median_interval

METRICS = ("train_loss", "val_loss", "val_top1", "val_top5", "val_perplexity_token")
NAMES = tuple(column.name for column in LEARNING if column.source == "equal")


def learning_table(epochs: pd.DataFrame, runs: Sequence[AttemptRow]) -> pd.DataFrame:
    """One row for each epoch of runs that differ in seed and repeat alone, of those that ended ok."""
    ended = {run.row["path"]: run.row for run in runs if run.ok and run.row["learning"]}
    codes, paths = pd.factorize(epochs["path"].to_numpy(object))
    taken = np.array([path in ended for path in paths], bool)[codes]
    values = plain(epochs, [], ["epoch", "elapsed_s", *METRICS])[taken]
    if values.empty:
        return frame(LEARNING, [])
    rows = [ended.get(path, {}) for path in paths]
    curves, names = pd.factorize(np.array([row.get("learning") for row in rows], object))
    values["learning"] = curves[codes[taken]]
    values["seed"] = np.array([row.get("seed") for row in rows], "float64")[codes[taken]]
    groups = values.groupby(["learning", "epoch"], sort=False)
    of_seeds = values.groupby(["learning", "epoch", "seed"], sort=False, dropna=False)[list(METRICS)].median()
    seeds = of_seeds.groupby(level=["learning", "epoch"], sort=False)
    counts = {"runs": groups.size(), "seeds": seeds.size(), "elapsed_s": groups["elapsed_s"].median()}
    ranges = [seeds.median(), seeds.min().add_suffix("_min"), seeds.max().add_suffix("_max")]
    merged = pd.concat([pd.DataFrame(counts), *ranges], axis=1)
    for metric in METRICS:
        ends = _intervals(of_seeds[metric])
        merged[f"{metric}_low"], merged[f"{metric}_high"] = ends["low"], ends["high"]
    table = merged.reset_index()
    samples = {row["learning"]: row for row in reversed(list(ended.values()))}
    curves = table["learning"].to_numpy()
    named = {name: np.array([samples[key][name] for key in names], object)[curves] for name in NAMES}
    complete = table.assign(**named, learning=names[curves])
    return typed(pa.Table.from_pandas(complete, schema_of(LEARNING), preserve_index=False))


def _intervals(values: Any) -> pd.DataFrame:
    """The interval of the median over seeds, where there are enough. values: indexed by curve, epoch and seed"""
    listed = values.dropna().groupby(level=["learning", "epoch"], sort=False).agg(list)
    intervals = {key: interval for key, of_seeds in listed.items() if (interval := median_interval(of_seeds))}
    return pd.DataFrame({end: {key: getattr(one, end) for key, one in intervals.items()} for end in ("low", "high")})
