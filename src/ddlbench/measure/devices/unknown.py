"""Values that are not known everywhere: None where a device or the kernel does not report them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def or_none(read: Callable[[], T]) -> T | None:
    """What `read` returns, or None: an incomplete record is better than a run that fails while it collects facts."""
    try:
        return read()
    except Exception:
        return None


def difference(first: float | None, last: float | None) -> float | None:
    """What a counter has grown by; None where one of the readings is not known."""
    return None if first is None or last is None else last - first


def total(values: Iterable[Number | None]) -> Number | None:
    """The sum; None without a value and where one is not known, because a part is no result."""
    readings = list(values)
    numbers = [value for value in readings if value is not None]
    return sum(numbers) if readings and len(numbers) == len(readings) else None  # pyright: ignore[reportReturnType]


def largest(values: Iterable[Number | None]) -> Number | None:
    """The largest of the values that are known; None if there is none."""
    return max((value for value in values if value is not None), default=None)


def least(values: Iterable[Number | None]) -> Number | None:
    """The smallest of the values that are known; None if there is none."""
    return min((value for value in values if value is not None), default=None)
