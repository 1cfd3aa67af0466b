"""Rows of tables as plain objects, by the names of their columns (record/columns.toml), None for what is unknown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

Row = dict[str, Any]
Item = TypeVar("Item")


def group_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    """Items of equal key together, in the order of their first appearance."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
