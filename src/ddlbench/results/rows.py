"""Rows of tables as plain objects, by the names of their columns (record/columns.toml), None for what is unknown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar, cast

Row = dict[str, Any]
Settings = dict[str, str]  # their values as texts, by key
Item = TypeVar("Item")

OWN, PUBLISHED = "own", "published"  # values of the column `origin`


def section(record: Mapping[str, Any], key: str) -> Row:
    """A section of a record; empty if it is missing, or no JSON object."""
    value = record.get(key)
    return cast(Row, value) if isinstance(value, dict) else {}


def wait_column(row: Mapping[str, Any]) -> str:
    """The column that has the share of the measured time in which ranks wait for data. A record of an older version has
    that of the worst epoch alone."""
    return "data_wait_share" if row.get("data_wait_mean_share") is None else "data_wait_mean_share"


def without_data_wait(seconds: float, share: float | None) -> float:
    """Seconds less the share in which ranks wait for data, which the oracle does not predict. share: None for none"""
    return seconds * (1 - (share or 0.0))


def latest(runs: Iterable[Row]) -> Row:
    """The row of runs.csv whose attempt started last: starts are ISO 8601 in UTC."""
    return max(runs, key=lambda run: (run["start"] or "", run["attempt"] or 0))


def group_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    """Items of equal key together, in the order of their first appearance."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
