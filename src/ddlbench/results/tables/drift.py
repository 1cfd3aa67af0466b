"""What makes a campaign's numbers doubtful: efficiencies above 100 %, and times that change during the campaign."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddlbench.results.rows import Row
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.ratios import base_name
from ddlbench.results.tables.stats import Interval, median, median_interval, ratio_interval, verdict

ROUNDING = 1e-9
FEWEST = 6  # runs with repeats: two a third
RATIOS = (("efficiency", "best_single"), ("efficiency_vs_own_base", "own_base"))


def questions(scaling: Iterable[Row]) -> list[str]:
    """A sentence for each efficiency above 100 %."""
    return list(dict.fromkeys(text for row in scaling for names in RATIOS if (text := _question(row, *names))))


def _question(row: Row, column: str, base: str) -> str | None:
    value, low = row.get(column), row.get(f"{column}_low")  # a ratio without a value is not in the row
    if value is None or value <= 1 + ROUNDING:
        return None
    name = f"{row['framework']}, {row['model']}, {row['gpus']} GPUs: {column} of {100 * value:.1f} %"
    base_text = f"{base_name(row, base)}, {1e3 * row[f'{base}_sample_time_s']:.3g} ms a sample"
    if low is not None and low <= 1:
        return f"{name} is above 100 %, which its interval does not show: it begins at {100 * low:.1f} %"
    few = " (without an interval)" if low is None else ""
    return (
        f"{name} is above 100 %{few}: is the base ({base_text}) slow for a reason of its own, such as memory or caches?"
    )


def drift(groups: Sequence[Sequence[AttemptRow]]) -> str | None:
    """Compare the last third of a campaign's runs, by start, with the first third. None below 6 runs that have repeats.

    Each run's seconds a sample are divided by the median of its repeats, so that a third may mix any measurements.
    Nothing is dropped or corrected.
    """
    timed = sorted(ratio for group in groups for ratio in _relative(group))
    if len(timed) < FEWEST:
        return None
    size = len(timed) // 3
    first, last = ([ratio for _, ratio in third] for third in (timed[:size], timed[-size:]))
    change = median(last) / median(first)
    text = f"drift: the last third of {len(timed)} repeated runs took {change:.3f} times the first third's time"
    return f"{text} ({_shown(median_interval(first), median_interval(last), size)})"


def _relative(group: Sequence[AttemptRow]) -> list[tuple[str, float]]:
    """(start, seconds a sample over the median of the repeats) of a measurement with repeats."""
    rows = [run.row for run in group if run.ok and run.row["start"] and run.row["throughput_samples_per_s"]]
    if len(rows) < 2:
        return []
    times = [1 / row["throughput_samples_per_s"] for row in rows]
    middle = median(times)
    return [(str(row["start"]), time / middle) for row, time in zip(rows, times, strict=True)]


def _shown(first: Interval | None, last: Interval | None, size: int) -> str:
    if first is None or last is None:
        return f"n={size} each, too few for an interval"
    ratio = ratio_interval(last, first)
    said = verdict(ratio, "slower", "faster", "no drift shown")
    return f"{ratio.low:.3f} to {ratio.high:.3f}, n={size} each: {said}"
