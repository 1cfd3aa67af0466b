"""Which attempts are repeats of one measurement, and which measurements may be compared."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from sys import intern
from typing import Any, cast

from ddlbench.config.identity import added_later, measured_part
from ddlbench.config.keys import Options
from ddlbench.record.fingerprint import of_the_launch
from ddlbench.results.rows import Row, group_by
from ddlbench.texts import digest

# Columns that a run observes instead of configures. A failed attempt may have ended before it recorded them.
SEEN = ("dataset_hash", "device", "device_model", "torch", "cuda", "global_batch", "environment_id")
# Columns of SEEN that may differ between rows that are compared; checks.py warns of a difference.
_NOT_COMPARED = ("global_batch", "environment_id")
# The layout of a framework's ranks; it differs over the GPU counts of one curve.
LAYOUT = ("framework.dp", "framework.tp", "framework.pp")
FACTORS = ("framework", "loader", "model")  # that a report may compare: each is a group of the configuration
# What a measurement may have several values of, and what `global_batch` says better.
SEED = "train.seed"  # differs over runs of one curve of quality
FREE = ("train.repeat", "train.global_batch", "train.batch_per_gpu", "cluster.notes")


@dataclass(frozen=True)
class AttemptRow:
    """What one attempt gives the tables.

    row:         its row of runs.csv
    options:     the measured part of its configuration, as dotted keys
    environment: the part of its environment that repeats must share
    noted:       the part in which repeats may differ, with a warning
    epochs:      a pyarrow table of `epoch_lines.SCHEMA`
    identity:    as `Attempt.identity`
    has_end:     whether the record itself says how the run ended
    warnings:    of what is left out, and in `left_out` its kinds
    """

    row: Row
    options: Row
    environment: Row = field(default_factory=dict[str, Any])
    noted: Row = field(default_factory=dict[str, Any])
    epochs: Any = ()
    folder: Path = Path()
    identity: Hashable = None
    has_end: bool = True
    warnings: Sequence[str] = ()
    left_out: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        return self.row["status"] == "ok"

    @cached_property
    def asked(self) -> str:
        """Equal for repeats."""
        return asked(self)

    @cached_property
    def seen(self) -> tuple[Any, ...]:
        """Equal for repeats that ended ok."""
        return tuple(self.row[name] for name in SEEN)

    @cached_property
    def comparison(self) -> str:
        """Equal for rows that differ in the framework and what may differ with it."""
        return comparison_id(self)


_added_later = cache(partial(added_later, Options))


def measured_options(config: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Row:
    """The configuration as dotted keys, without what does not change a measurement.

    before: the keys that a later version added, with the value at which they are left out, as the record says
    """
    return _flatten(measured_part(config, _added_later() | dict(before or {})))


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Row:
    """{"train": {"seed": 0}} -> {"train.seed": 0}."""
    flat: Row = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(cast(Row, value), f"{prefix}{key}.")
        else:
            flat[intern(prefix + key)] = value
    return flat


def measurements(runs: Iterable[AttemptRow]) -> list[list[AttemptRow]]:
    """Groups of repeats. Runs that ended ok are merged if their options and all columns of SEEN are equal. Another
    attempt joins the one group that its recorded columns agree with; if there are none or several, it stays alone. So
    the first of a group ended ok if any did."""
    measured: list[list[AttemptRow]] = []
    for alike in group_by(runs, lambda run: run.asked).values():
        groups = list(group_by((run for run in alike if run.ok), lambda run: run.seen).values())
        for run in sorted((run for run in alike if not run.ok), key=lambda run: run.seen.count(None)):
            fitting = [
                group
                for group in groups
                if all(value in (None, expected) for value, expected in zip(run.seen, group[0].seen, strict=True))
            ]
            if len(fitting) == 1:
                fitting[0].append(run)
            else:
                groups.append([run])
        measured += groups
    return measured


def asked(run: AttemptRow, free: Sequence[str] = FREE) -> str:
    """What repeats are asked to do, as a text; free: the keys that may have several values."""
    options = {key: value for key, value in run.options.items() if key not in free}
    return json.dumps([options, run.row["gpus"], run.row["nodes"]], sort_keys=True, default=str)


def measurement_id(run: AttemptRow, *more: str) -> str:
    """Names a group of repeats in both tables, with SEED those of any seed. more: other keys that may differ"""
    return digest([asked(run, (*FREE, *more)), run.seen])


def comparison_id(run: AttemptRow, by: str = "framework", more: Sequence[str] = ()) -> str:
    """Equal for rows that differ in the compared factor, GPU count, batch sizes and site alone.

    by:   one of FACTORS
    more: other keys that may differ
    """
    free = (*FREE, *more, *LAYOUT, *(("train.micro_batch",) if by == "framework" else ()))
    shared = {k: v for k, v in run.options.items() if k not in free and not k.startswith((f"{by}.", "cluster."))}
    return digest([shared, [run.row[name] for name in SEEN if name not in _NOT_COMPARED]])


def curve_id(run: AttemptRow, by: str = "framework") -> str:
    """Equal for the points of one curve: the same value of the compared factor, with its settings, train.micro_batch,
    versions and kind of host, whatever the layout."""
    options = {key: value for key, value in run.options.items() if key.startswith(f"{by}.") and key not in LAYOUT}
    around = {key: value for key, value in run.environment.items() if not of_the_launch(key)}
    return digest([options, run.options.get("train.micro_batch"), around])
