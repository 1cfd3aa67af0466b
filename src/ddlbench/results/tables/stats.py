"""Medians with distribution-free intervals, and intervals of their ratios (Hoefler and Belli, SC'15, rules 1 to 8).

Everything here takes seconds. Ratios are formed once, from merged seconds, and never averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LEVEL = 0.95
SMALLEST_N = 6  # the widest interval of five values, from least to largest, covers the median with 93.75 % only
NONE_SHOWN = "no speedup shown"


@dataclass(frozen=True)
class Interval:
    """An interval of a median or of a ratio of medians; `coverage` is its true probability."""

    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float]) -> Interval | None:
    """The narrowest pair of order statistics [x(k), x(n+1-k)] that covers the median with probability LEVEL or more.

    The number of values below the median is binomial(n, 1/2) whatever their distribution, so the pair covers it with
    probability 1 - 2 P(B < k). None where even the whole range covers less: below six values at 95 %.
    """
    n, ordered = len(values), sorted(values)
    # The ways in which B = 0, 1, ..., of 2^n: comb(n, k) from the one before, because computing each anew would take
    # minutes for thousands of values.
    ways = accumulate(range(1, n // 2), lambda before, k: before * (n + 1 - k) // k, initial=1)
    coverages = [1 - 2 * beyond / 2**n for beyond in accumulate(ways)]  # for k = 1, 2, ...: they fall with k
    k = sum(coverage >= LEVEL for coverage in coverages)
    return Interval(ordered[k - 1], ordered[n - k], coverages[k - 1]) if k else None


def confidence(n: int, interval: Interval | None) -> str:
    """The note beside a median of n values."""
    return f"n={n}, {interval.coverage:.1%} CI".replace("%", " %") if interval else f"n={n}, no 95 % CI"


def ratio_interval(over: Interval, under: Interval) -> Interval:
    """An interval of the ratio of two medians, over / under, from the ends of their intervals.

    It is conservative: the ratio lies in it wherever both medians lie in their intervals. So it covers with at least 1
    minus the probabilities that one of them misses (Bonferroni), independent or not, and mostly with more.
    """
    return Interval(over.low / under.high, over.high / under.low, over.coverage + under.coverage - 1)


def verdict(ratio: Interval, above: str, below: str, none: str) -> str:
    """`above` or `below` where the whole interval lies above or below 1, else `none`."""
    return above if ratio.low > 1 else below if ratio.high < 1 else none
