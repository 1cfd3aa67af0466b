"""Which attempts are repeats of one measurement, and which measurements may be compared."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from sys import intern
from typing import Any, cast

from ddlbench.config.keys import Options, added_later, measured_part
from ddlbench.errors import UserError
from ddlbench.record.fingerprint import of_the_launch
from ddlbench.results.reading.attempts import Note
from ddlbench.results.rows import PUBLISHED, Row, Settings, group_by
from ddlbench.results.tables.stats import median_interval
from ddlbench.texts import digest, printable

# Columns that a run observes; they are not configured. A failed attempt may have ended before it recorded them.
SEEN = ("dataset_hash", "device", "device_model", "torch", "cuda", "global_batch", "environment_id")
# Columns of SEEN that may differ between compared rows; checks.py warns of a difference.
_NOT_COMPARED = ("global_batch", "environment_id")
# The layout of a framework's ranks. It differs between the GPU counts of one curve.
LAYOUT = ("framework.dp", "framework.tp", "framework.pp", "framework.sp")
FACTORS = ("framework", "loader", "model")  # groups of the configuration that a report may compare
ANY_SCALING = "scaling"  # in Comparison.across
# Columns of SEEN that belong to a setting.
_SEEN_WITH = {"data": ("dataset_hash",), "device": ("device", "device_model"), "torch": ("torch", "cuda")}
SEED = "train.seed"  # differs between the runs of one curve of quality
# Keys of which a measurement may have several values, and those that `global_batch` says better.
FREE = ("train.repeat", "train.global_batch", "train.batch_per_gpu", "cluster.notes")
# What stays equal along a curve of each kind of scaling; for a single GPU count the samples of an update.
KINDS = {"strong": "global_batch", "weak": "batch_per_gpu"}


def size(row: Row, kind: str | None = None) -> Any:
    """The batch that stays equal along a kind of scaling: samples an update, or a GPU. kind: None: that of the row"""
    return row[KINDS.get(kind or row["scaling"], "global_batch")]


@dataclass(frozen=True)
class Comparison:
    """The settings in which rows of one table, with one panel and one base, may differ.

    by:     the compared factors, of FACTORS
    across: other settings: groups of the configuration (recipe), keys (train.tf32, or without `train.`), columns of
            SEEN, and ANY_SCALING for rows of weak and of strong scaling, with any batch
    lacking: those of `across` that all runs may lack
    """

    by: tuple[str, ...] = FACTORS[:1]
    across: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()

    def is_compared(self, key: str) -> bool:
        """Whether a key of the configuration belongs to a compared factor; the micro batch goes with the framework."""
        return key.startswith(tuple(f"{factor}." for factor in self.by)) or (
            "framework" in self.by and key == "train.micro_batch"
        )

    def is_across(self, key: str) -> bool:
        """Whether a key of the configuration, or a column of SEEN, belongs to a setting of `across`."""
        return any(
            key in (name, f"train.{name}", *_SEEN_WITH.get(name, ())) or key.startswith(f"{name}.")
            for name in self.across
        )

    def check(self, runs: Sequence[AttemptRow]) -> None:
        """UserError for an unknown factor in `by`, and for a factor or a setting that no run has in `across`."""
        for name in self.by:
            if name not in FACTORS:
                raise UserError(f"--by {printable(name)}: choose of {', '.join(FACTORS)}")
        keys = {*SEEN, *(key for run in runs for key in (*run.options, *run.added_later))}
        for name in self.across:
            if name in FACTORS:
                raise UserError(f"--across {name}: it is a factor that is compared: give it with --by")
            if name not in (ANY_SCALING, *self.lacking) and not any(map(replace(self, across=(name,)).is_across, keys)):
                raise UserError(
                    f"--across {printable(name)}: no run has this setting; give recipe, precision, data, scaling, or a "
                    "key of the configuration such as train.tf32"
                )

    def comparison_id(self, run: AttemptRow, *more: str) -> str:
        """Equal for rows that differ only in the compared factors, the settings of `across`, GPU count, batch sizes and
        site. more: other keys that may differ"""
        free = (*FREE, *more, *LAYOUT)
        shared = {
            key: value
            for key, value in run.options.items()
            if not (key in free or key.startswith("cluster.") or self.is_compared(key) or self.is_across(key))
        }
        seen = [run.row[name] for name in SEEN if name not in _NOT_COMPARED and not self.is_across(name)]
        return digest([shared, seen])

    def curve_id(self, run: AttemptRow) -> str:
        """Equal for the points of one curve. They have the same values of the compared factors and of `across`, with
        their settings, the same train.micro_batch, versions and kind of host, but may have any layout."""
        options = {
            key: value
            for key, value in run.options.items()
            if (self.is_compared(key) or self.is_across(key)) and key not in (*LAYOUT, *FREE)
        }
        seen = [run.row[name] for name in SEEN if self.is_across(name)]
        around = {key: value for key, value in run.environment.items() if not of_the_launch(key)}
        return digest([options, seen, run.options.get("train.micro_batch"), around])


BY_FRAMEWORK = Comparison()
# The passes of one rank: part (forward, backward, update), and begin and end in the profiled window in seconds.
RankPasses = list[tuple[str, float, float]]


@dataclass(frozen=True)
class AttemptRow:
    """One attempt, as the tables use it.

    row:         its row of runs.csv
    options:     the measured part of its configuration, as dotted keys
    environment: the part of its environment that repeats must share
    noted:       the part in which repeats may differ, with a warning
    added_later: keys of its configuration that a later version added, with the values that `options` leaves out
    sizes:       those of its model that differ from the published ones
    epochs:      a pyarrow table of `cells.EPOCH_SCHEMA`
    identity:    as `Attempt.identity`
    has_end:     whether the record itself says how the run ended
    notes:       on what is left out
    passes:      for each rank of a profiled pipeline, by its stage
    """

    row: Row
    options: Row
    environment: Row = field(default_factory=dict[str, Any])
    noted: Row = field(default_factory=dict[str, Any])
    added_later: Row = field(default_factory=dict[str, Any])
    sizes: Settings = field(default_factory=dict[str, str])
    epochs: Any = ()
    folder: Path = Path()
    identity: Hashable = None
    has_end: bool = True
    notes: Sequence[Note] = ()
    passes: Mapping[int, RankPasses] = field(default_factory=dict[int, RankPasses])

    @property
    def ok(self) -> bool:
        return self.row["status"] == "ok"

    def asked(self, *more: str) -> str:
        """The configuration and GPUs that all repeats have in common, as a text. more: other keys that may differ"""
        free = (*FREE, *more)
        options = {key: value for key, value in self.options.items() if key not in free}
        return json.dumps([options, self.row["gpus"], self.row["nodes"]], sort_keys=True, default=str)

    @cached_property
    def seen(self) -> tuple[Any, ...]:
        """Equal for repeats that ended ok."""
        return tuple(self.row[name] for name in SEEN)

    def measurement_id(self, *more: str) -> str:
        """The name of a group of repeats in both tables. more: as for `asked`; SEED: repeats of any seed"""
        return digest([self.asked(*more), self.seen])

    @cached_property
    def comparison(self) -> str:
        """Equal for rows that differ only in the framework and what may differ with it."""
        return BY_FRAMEWORK.comparison_id(self)


_ADDED_LATER = added_later(Options)


def measured_options(config: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Row:
    """The configuration as dotted keys, without those that do not change a measurement.

    before: keys that a later version added, with the values at which they are left out; the record says them
    """
    return flatten(measured_part(config, _ADDED_LATER | dict(before or {})))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Row:
    """{"train": {"seed": 0}} -> {"train.seed": 0}."""
    flat: Row = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(cast(Row, value), f"{prefix}{key}.")
        else:
            flat[intern(prefix + key)] = value
    return flat


def measurements(runs: Iterable[AttemptRow]) -> list[list[AttemptRow]]:
    """Groups of repeats. Runs that ended ok are merged if their options and all columns of SEEN are equal. An attempt
    that failed joins the only group with which its recorded columns agree, else it is a group by itself. So the first
    of a group ended ok if any of it did."""
    measured: list[list[AttemptRow]] = []
    for alike in group_by(runs, AttemptRow.asked).values():
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


class Point:
    """One measurement: attempts that are repeats of each other, and the settings that distinguish it from others.

    runs:          a group of `measurements`: the first one ended ok if any did
    settings:      by their columns of scaling.csv
    ok:            the runs that ended ok
    sample:        a run with the values that all repeats have in common, if possible one whose summary is used
    sample_times:  seconds a sample of each run; sample_time_s: their median; interval: that of the median
    cluster:       that of an own measurement
    compared:      the values of the compared factors, in words
    comparison, curve: as `comparison_id` and `curve_id`
    verdict_group: equal for points between which a verdict is given: they differ only in the compared factors
    """

    def __init__(
        self, runs: Sequence[AttemptRow], how: Comparison = BY_FRAMEWORK, settings: dict[str, Settings] | None = None
    ) -> None:
        self.runs, self.how, self.settings = runs, how, settings or {}
        self.ok = [run for run in runs if run.ok]
        self.sample = next((run for run in self.ok if run.row["throughput_samples_per_s"]), runs[0])
        self.gpus: int | None = self.sample.row["gpus"]
        self.cluster: str | None = None if self.sample.row["origin"] == PUBLISHED else self.sample.row["cluster"]
        self.sample_times = [1 / rate for rate in self.values("throughput_samples_per_s") if rate > 0]
        self.sample_time_s = median(self.sample_times) if self.sample_times else None
        self.interval = median_interval(self.sample_times)
        self.compared = ", ".join(str(self.sample.row[factor]) for factor in how.by)
        self.comparison, self.curve = how.comparison_id(self.sample), how.curve_id(self.sample)
        self.verdict_group = Comparison(how.by).comparison_id(self.sample) if how.across else self.comparison

    def values(self, column: str) -> list[Any]:
        """The recorded values of a column in the runs that ended ok."""
        return [run.row[column] for run in self.ok if run.row[column] is not None]
