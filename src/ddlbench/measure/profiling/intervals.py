"""Sets of time as sorted, disjoint intervals [begin, end) of whole nanoseconds: sums of lengths are exact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """The time covered by any of the intervals, in whatever order and however they overlap."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """The time in both sets."""
    common: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Intervals, second: Intervals) -> Intervals:
    """The time in the first set and not in the second."""
    if not first:
        return []
    edges = [first[0][0], *(edge for interval in second for edge in interval), first[-1][1]]
    return intersection(first, union(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Intervals) -> int:
    """Nanoseconds of a set."""
    return sum(end - begin for begin, end in intervals)
