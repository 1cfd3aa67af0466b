"""Sentences on which of several comparable measurements is faster, where the repeats allow one (Hoefler and Belli)."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.report.merge import Row, group_by
from ddlbench.report.panels import batch_size, curve_name, devices, duration, scaling_text
from ddlbench.report.stats import Interval


def comparisons(scaling: Sequence[Row]) -> list[str]:
    """Each measurement against the fastest one at the same model, batch and GPU count."""
    rows = [row for row in scaling if row["sample_time_s"] and row["gpus"]]
    groups = group_by(rows, lambda row: (row["comparison"], row["scaling"], batch_size(row), row["gpus"]))
    sentences: list[str] = []
    for group in groups.values():
        fastest, *others = sorted(group, key=lambda row: row["sample_time_s"])
        alone = ", loader alone" if fastest["mode"] == "loader" else ""
        where = f"{fastest['model']}{alone}, {scaling_text(fastest)}, {devices(fastest['gpus'], fastest['device'])}"
        sentences += [f"{where}: {_sentence(fastest, other)}" for other in others]
    return sentences


def _sentence(fast: Row, slow: Row) -> str:
    names = f"{_name(fast)} and {_name(slow)}"
    times = f"{duration(fast['sample_time_s'])} and {duration(slow['sample_time_s'])} a sample"
    one, two = _interval(fast), _interval(slow)
    if one is None or two is None:
        counts = f"n={fast['runs_ok']} and n={slow['runs_ok']}"
        return f"{names} took {times} ({counts}, no 95 % CI): too few repeats to tell them apart"
    if one.overlaps(two):
        return f"no difference shown between {names}: {times}, intervals {_range(one)} and {_range(two)} overlap"
    factor = slow["sample_time_s"] / fast["sample_time_s"]
    return (
        f"{_name(fast)} is {factor:.3g} times as fast as {_name(slow)}: {times}, "
        f"intervals {_range(one)} and {_range(two)} do not overlap"
    )


def _name(row: Row) -> str:
    return curve_name(row) + (f" [{row['layout']}]" if row["layout"] else "")


def _interval(row: Row) -> Interval | None:
    low, high = row["sample_time_low_s"], row["sample_time_high_s"]
    return None if low is None or high is None else Interval(low, high, 0.95)


def _range(interval: Interval) -> str:
    return f"{duration(interval.low)} to {duration(interval.high)}"
