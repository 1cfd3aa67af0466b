"""Rows of tables as plain objects: values by the names of their columns (record/columns.toml), None if unknown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

Row = dict[str, Any]
Settings = dict[str, str]  # values as texts, by key
Item = TypeVar("Item")

OWN, PUBLISHED = "own", "published"  # values of the column `origin`
# Frameworks by what their ranks share. Figures with many curves have a panel for each family, and errors of predictions
# are alike within some of them.
FAMILIES = {
    "data parallel": ("single", "ddp", "horovod", "local_sgd", "parameter_server", "zero0"),
    "sharded": ("fsdp", "zero1", "zero2", "zero3", "deepspeed"),
    "tensor": ("tensor", "megatron", "channel", "spatial"),
    "pipeline": (
        "gpipe", "1f1b", "interleaved", "zero_bubble", "looped_bfs", "zbv", "dualpipev", "pipedream", "pipedream_2bw",
    ),
    "hybrid": ("hybrid",),
}  # fmt: skip


def wait_column(row: Mapping[str, Any]) -> str:
    """The column with the share of the measured time in which ranks wait for data. A record of an older version has
    only the share of the worst epoch."""
    return "data_wait_share" if row.get("data_wait_mean_share") is None else "data_wait_mean_share"


def without_data_wait(seconds: float, row: Mapping[str, Any]) -> float:
    """The part of a row's seconds in which its ranks do not wait for data: the oracle predicts no waiting."""
    return seconds * (1 - (row[wait_column(row)] or 0.0))


def latest(runs: Iterable[Row]) -> Row:
    """The row of runs.csv whose attempt started last. Starts are texts in ISO 8601, in UTC."""
    return max(runs, key=lambda run: (run["start"] or "", run["attempt"] or 0))


def group_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    """The items by their keys, in the order in which the keys first appear."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
