"""Where the time of a step goes, from the profiled windows: breakdown.csv, one row a measurement that has one.

Its shares by GPU count are the table of Aach et al. 2023; its seconds of a step (forward, backward, update,
communication, data) the stacked bars of Lin et al. 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pandas as pd

from ddlbench.record.schema import BREAKDOWN

Row = dict[str, float | int | str | None]

SHARES = (
    "compute_share", "comm_exposed_share", "data_share", "idle_share", "comm_share",
    "forward_share", "backward_share", "update_share", "other_compute_share",
)  # fmt: skip
# The parts of a bar from bottom to top: they add up to profile_step_time_s. Communication is the exposed one.
BAR = {
    "forward_step_s": "forward_share",
    "backward_step_s": "backward_share",
    "update_step_s": "update_share",
    "other_compute_step_s": "other_compute_share",
    "comm_exposed_step_s": "comm_exposed_share",
    "data_step_s": "data_share",
    "idle_step_s": "idle_share",
}


def merged_windows(runs: Sequence[Row]) -> Row:
    """Shares and step time of repeats, from the sums of their seconds; runs without a window do not count."""
    known = [run for run in runs if _number(run, "profile_window_s") and _number(run, "profile_steps")]
    if not known:
        return {"profile_windows": 0}
    whole = sum(_number(run, "profile_window_s") for run in known)
    steps = sum(_number(run, "profile_steps") * _number(run, "gpus") for run in known)  # of single ranks
    shares = {name: sum(_number(run, name) * _number(run, "profile_window_s") for run in known) for name in SHARES}
    return {
        **{name: seconds / whole for name, seconds in shares.items()},
        "profile_step_time_s": whole / steps,
        "profile_windows": len(known),
    }


def breakdown(scaling: pd.DataFrame) -> pd.DataFrame:
    """The rows of scaling.csv that have a window, each measurement once, in the order of that table."""
    with_window = cast(pd.DataFrame, scaling[scaling["profile_windows"].fillna(0) > 0])
    rows = with_window.drop_duplicates(subset=["measurement"])
    seconds = {name: rows[share] * rows["profile_step_time_s"] for name, share in BAR.items()}
    return rows.assign(**seconds).reset_index(drop=True).filter([column.name for column in BREAKDOWN])


def _number(run: Row, name: str) -> float:
    value = run[name]
    return float(value) if value is not None else 0.0
