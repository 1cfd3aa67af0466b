"""Where the time of a step goes, from the profiled windows: breakdown.csv, one row a measurement that has one.

Its shares by GPU count are the table of Aach et al. 2023; its seconds of a step (forward, backward, update,
communication, data) the stacked bars of Lin et al. 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import cast

import pandas as pd

from ddlbench.record.schema import BREAKDOWN
from ddlbench.results.rows import Row

SHARES = (
    "compute_share", "comm_exposed_share", "data_share", "idle_share", "comm_share",
    "forward_share", "backward_share", "update_share", "other_compute_share",
)  # fmt: skip
# What a step is made of, in the order of a bar from bottom to top: the shares PART_share add up to 1, the seconds
# PART_step_s to profile_step_time_s. Communication is the exposed one.
PARTS = ("forward", "backward", "update", "other_compute", "comm_exposed", "data", "idle")


def merged_windows(runs: Sequence[Row]) -> Row:
    """Shares and step time of repeats, from the sums of their seconds; runs without a window do not count."""
    profiled = [run for run in runs if all(run[name] for name in ("profile_window_s", "profile_steps", "gpus"))]
    if not profiled:
        return {"profile_windows": 0}
    window_s = sum(run["profile_window_s"] for run in profiled)
    steps = sum(run["profile_steps"] * run["gpus"] for run in profiled)  # of single ranks
    complete = [name for name in SHARES if all(run[name] is not None for run in profiled)]
    return {
        **{name: sum(run[name] * run["profile_window_s"] for run in profiled) / window_s for name in complete},
        "profile_step_time_s": window_s / steps,
        "profile_windows": len(profiled),
    }


def merged_own_steps(runs: Sequence[Row]) -> Row:
    """Medians over the runs whose own steps have the same source: the profiled window if a run has one."""
    names = ("own_step_s", "own_step_median_rank_s")
    for source in ("window", "thread"):
        rows = [run for run in runs if run["own_step_source"] == source and None not in map(run.get, names)]
        if rows:
            return {"own_step_source": source, **{name: median(run[name] for run in rows) for name in names}}
    return {}


def breakdown(scaling: pd.DataFrame) -> pd.DataFrame:
    """The rows of scaling.csv that have a window, each measurement once, in the order of that table."""
    with_window = cast(pd.DataFrame, scaling[scaling["profile_windows"].fillna(0) > 0])
    rows = with_window.drop_duplicates(subset=["measurement"])
    computed = {f"{part}_step_s": rows[f"{part}_share"] * rows["profile_step_time_s"] for part in PARTS}
    computed["comm_overlap_share"] = rows["comm_share"] - rows["comm_exposed_share"]
    return rows.assign(**computed).reset_index(drop=True).filter([column.name for column in BREAKDOWN])
