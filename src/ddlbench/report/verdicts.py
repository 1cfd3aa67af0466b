"""Sentences on which of several comparable measurements is faster, where the repeats allow one (Hoefler and Belli)."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.figures.panels import batch_size, curve_name, devices, duration, scaling_text
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.ratios import NONE_SHOWN, base_name
from ddlbench.results.tables.stats import LEVEL, Interval, ratio_interval


def comparisons(scaling: Sequence[Row]) -> list[str]:
    """A sentence for each model, batch and GPU count: the fastest measurement against the others; a sentence for the
    ratios to the best single GPU; at the end the number of comparisons, because each may be wrong by chance."""
    rows = [row for row in scaling if row["sample_time_s"] and row["gpus"]]
    groups = group_by(rows, lambda row: (row["comparison"], row["scaling"], batch_size(row), row["gpus"]))
    sentences: list[str] = []
    decided = 0
    for group in groups.values():
        fastest, *others = sorted(group, key=lambda row: row["sample_time_s"])
        alone = ", loader alone" if fastest["mode"] == "loader" else ""
        models = ", ".join(dict.fromkeys(str(row["model"]) for row in group))
        where = f"{models}{alone}, {scaling_text(fastest)}, {devices(fastest['gpus'], fastest['device'])}"
        if others:
            sentences.append(f"{where}: {'; '.join(_sentence(fastest, other) for other in others)}")
        based = [row for row in group if row["speedup_low"] is not None and row["gpus"] > 1]
        if based:
            sentences.append(f"{where}, against {_base(fastest)}: {'; '.join(map(_against_base, based))}")
        decided += len(based) + sum(bool(sample_interval(fastest) and sample_interval(other)) for other in others)
    return [*sentences, *([_multiplicity(decided)] if decided > 1 else [])]


def _multiplicity(count: int) -> str:
    return (
        f"{count} comparisons with intervals, not corrected for their number: each is wrong with probability "
        f"{2 * (1 - LEVEL):.0%} at most, so by chance up to about {2 * (1 - LEVEL) * count:.1f} of them"
    ).replace("%", " %")


def _base(row: Row) -> str:
    return f"{base_name(row, 'best_single')} on {devices(1, row['device'])}"


def _against_base(row: Row) -> str:
    ends = f"{row['speedup_low']:.3g} to {row['speedup_high']:.3g}"
    if row["speedup_verdict"] == NONE_SHOWN:
        return f"{row_name(row)}: {NONE_SHOWN} ({ends})"
    return f"{row_name(row)} is {row['speedup']:.3g} times as fast ({ends})"


def _sentence(fast: Row, slow: Row) -> str:
    names = f"{row_name(fast)} and {row_name(slow)}"
    times = f"{duration(fast['sample_time_s'])} and {duration(slow['sample_time_s'])} a sample"
    one, two = sample_interval(fast), sample_interval(slow)
    if one is None or two is None:
        counts = f"n={fast['runs_ok']} and n={slow['runs_ok']}"
        return f"{names} took {times} ({counts}, no 95 % CI): too few repeats to tell them apart"
    effect = ratio_interval(two, one)
    ends = f"{effect.low:.3g} to {effect.high:.3g}"
    if one.overlaps(two):
        return f"no difference shown between {names}: {times}, their ratio is {ends}"
    factor = slow["sample_time_s"] / fast["sample_time_s"]
    return f"{row_name(fast)} is {factor:.3g} times as fast as {row_name(slow)}: {times}, the ratio is {ends}"


def row_name(row: Row) -> str:
    """The row's curve, and the layout of its ranks if the configuration sets it."""
    return curve_name(row) + (f" [{row['layout']}]" if row["layout"] else "")


def sample_interval(row: Row) -> Interval | None:
    """The interval of the median of a sample's time; None with too few repeats."""
    low, high = row["sample_time_low_s"], row["sample_time_high_s"]
    return None if low is None or high is None else Interval(low, high, LEVEL)
