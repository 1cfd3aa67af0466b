"""Speedup and efficiency of a measurement over a base, with the interval that follows from both intervals.

Speedup and efficiency follow Aach et al. 2023, equations 3 and 4, with seconds per sample for the time: T_p0 / T_p and
T_p0 p0 / (T_p p). Seconds per sample serve strong scaling, weak scaling over a fixed data set and shortened epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlbench.results.rows import Row
from ddlbench.results.tables.stats import Interval, efficiency, ratio_interval, speedup, verdict

NONE_SHOWN = "no speedup shown"


@dataclass(frozen=True)
class Timed:
    """What a ratio needs of a measurement: seconds per sample, their interval, GPUs, and what names it as a base.

    compared: its value of the compared factor
    """

    framework: str | None
    compared: str | None
    gpus: int
    sample_time_s: float
    interval: Interval | None
    epoch_time_s: float | None


def against(timed: Timed | None, base: Timed | None, prefix: str, suffix: str = "") -> Row:
    """The columns of one base: its own, named with `prefix`, and speedup and efficiency, named with `suffix`."""
    if base is None:
        return {}
    row: Row = {
        f"{prefix}_framework": base.framework,
        f"{prefix}_compared": base.compared,
        f"{prefix}_gpus": base.gpus,
        f"{prefix}_sample_time_s": base.sample_time_s,
        f"{prefix}_epoch_time_s": base.epoch_time_s,
    }
    if timed is None:
        return row
    row[f"speedup{suffix}"] = speedup(base.sample_time_s, timed.sample_time_s)
    row[f"efficiency{suffix}"] = efficiency(base.sample_time_s, base.gpus, timed.sample_time_s, timed.gpus)
    return row | _interval(timed, base, suffix)


def base_name(row: Row, kind: str) -> str:
    """The base's value of the compared factor: "ddp", with --by loader "dali". kind: "best_single" | "own_base" """
    return str(row["best_single_compared" if kind == "best_single" else "compared"])  # a row and its own base share it


def _interval(timed: Timed, base: Timed, suffix: str) -> Row:
    """The intervals of both ratios. A base compared with itself has none, because its ratio is 1 by definition."""
    if timed is base or timed.interval is None or base.interval is None:
        return {}
    ratio, share = ratio_interval(base.interval, timed.interval), base.gpus / timed.gpus
    return {
        f"speedup{suffix}_low": ratio.low,
        f"speedup{suffix}_high": ratio.high,
        f"speedup{suffix}_coverage": ratio.coverage,
        f"speedup{suffix}_verdict": verdict(ratio, "speedup", "slowdown", NONE_SHOWN),
        f"efficiency{suffix}_low": ratio.low * share,
        f"efficiency{suffix}_high": ratio.high * share,
    }
