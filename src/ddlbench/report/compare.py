"""Two sets of results: what changed in configuration and environment first, then the numbers, and a gate for both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ddlbench.errors import UserError
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.labels import knobs, settings_text, value_text, variants
from ddlbench.results.tables.measurement import devices, duration
from ddlbench.results.tables.merge import FREE, SEEN, AttemptRow, Point
from ddlbench.results.tables.stats import ratio_interval, verdict
from ddlbench.texts import first_few

Group: TypeAlias = list[AttemptRow]
Pair: TypeAlias = tuple[Group, Group]

SLOWER, UNDECIDED = 1, 3  # exit codes of the gate; 2 is that of a wrong command
NAMES = ("mode", "framework", "model", "model_changed", "loader", "data", "recipe", "precision", "device", "gpus")
# Columns of runs.csv, and "asked": the configuration that repeats share.
REQUEST = ("asked", "global_batch", "device")
NAMED = (*NAMES, "nodes", "global_batch")
# What is equal for both measurements of a pair, the strictest first. The last one allows other numbers of nodes: nodes
# of one cluster have 4 GPUs, nodes of another one have 8.
KEYS = (
    (*REQUEST, "environment_id", "dataset_hash", "device_model", "torch"), REQUEST, NAMED, (*NAMES, "global_batch"),
)  # fmt: skip
CHANGES_SHOWN = 30


@dataclass
class Versus:
    """The printed lines, and the measurements that decide the gate.

    slower:    shown to be slower by more than the limit, or no run ends ok any more
    undecided: too few repeats, no counterpart after, or one without a time
    possible:  not shown to be slower, but the interval reaches beyond the limit; does not fail the gate
    """

    lines: list[str] = field(default_factory=list[str])
    slower: list[str] = field(default_factory=list[str])
    undecided: list[str] = field(default_factory=list[str])
    possible: list[str] = field(default_factory=list[str])


def versus(before: Sequence[Group], after: Sequence[Group], limit: float | None = None) -> Versus:
    """Compare the measurements of two sets.

    Measurements of equal configuration are paired first, then those of equal names and batch, then those of equal names
    and batch on another number of nodes. UserError if there is no pair.

    limit: the share by which a measurement may be slower; None: no gate
    """
    pairs, left = _paired(before, after)
    if not pairs:
        raise UserError(
            f"the sets have no measurement in common ({len(before)} and {len(after)}): give two results_dir with the "
            "same framework, model, data and number of GPUs; several of one name in a set cannot be paired"
        )
    names = dict[int, str]()  # of each group, by its id: with the settings that distinguish it from others of its set
    for groups in (before, after):
        samples = [group[0] for group in groups]
        for group, one, two in zip(groups, knobs(samples), variants(samples), strict=True):
            names[id(group)] = ", ".join(filter(None, (_name(group), settings_text(one | two))))
    result = Versus([*_changes(pairs), "", "times (seconds a sample, medians; ratio after / before):"])
    for pair in pairs:
        _judge(result, names[id(pair[0])], pair, limit)
    for where, group in left:
        several = any(_key(NAMED, group) == _key(NAMED, other) for elsewhere, other in left if elsewhere != where)
        why = f"not paired in {where}, because others differ in settings alone" if several else f"only in {where}"
        result.lines.append(f"{why}: {names[id(group)]}")
    if limit is not None:
        gone = [group for where, group in left if where == "before" and any(run.ok for run in group)]
        result.undecided += [f"nothing to compare with after: {names[id(group)]}" for group in gone]
        percent = f"{100 * limit:g} %"
        lines = [f"slower by more than {percent}: {text}" for text in result.slower] + result.undecided
        lines = lines or [f"no measurement is shown to be slower by more than {percent}"]
        lines += [f"not shown, and more repeats may show it: {text}" for text in result.possible]
        result.lines += ["", *lines]
    return result


def _paired(before: Sequence[Group], after: Sequence[Group]) -> tuple[list[Pair], list[tuple[str, Group]]]:
    """The pairs of groups whose key occurs once on each side, and the groups without a counterpart."""
    pairs: list[Pair] = []
    left = {"before": list(before), "after": list(after)}
    for names in KEYS:
        old, new = (group_by(groups, partial(_key, names)) for groups in left.values())
        unique = [(old[key][0], new[key][0]) for key in old if len(old[key]) == len(new.get(key, ())) == 1]
        pairs += unique
        used = {id(group) for pair in unique for group in pair}
        left = {side: [group for group in groups if id(group) not in used] for side, groups in left.items()}
    return pairs, [(side, group) for side, groups in left.items() for group in groups]


def _key(names: Sequence[str], group: Group) -> tuple[Any, ...]:
    return tuple(group[0].asked() if name == "asked" else group[0].row[name] for name in names)


def _changes(pairs: Sequence[Pair]) -> list[str]:
    """Every change, with the number of measurements that have it."""
    counts = Counter[str]()
    seen = ["nodes", *(name for name in SEEN if name != "environment_id")]
    for (one, *_), (two, *_) in pairs:
        parts: list[tuple[str, Row, Row]] = [
            ("configuration", one.options, two.options),
            ("environment", one.environment | one.noted, two.environment | two.noted),
            ("seen", {name: one.row[name] for name in seen}, {name: two.row[name] for name in seen}),
        ]
        for part, old, new in parts:
            for key in old.keys() | new.keys():
                if key not in FREE and old.get(key) != new.get(key):
                    change = " -> ".join(value_text(side[key]) if key in side else "not set" for side in (old, new))
                    counts[f"{part}: {key}: {change}"] += 1
    if not counts:
        return ["nothing changed in configuration and environment"]
    lines = [
        text + ("" if count == len(pairs) else f" ({count} of {len(pairs)} measurements)")
        for text, count in sorted(counts.items())
    ]
    return ["changed:", *(f"  {line}" for line in first_few(lines, CHANGES_SHOWN))]


def _judge(result: Versus, name: str, pair: Pair, limit: float | None) -> None:
    """Add the line of one pair, and its verdict for the gate."""
    one, two = map(Point, pair)
    old, new = (", ".join(dict.fromkeys(str(run.row["status"]) for run in point.runs)) for point in (one, two))
    if not one.sample_time_s:
        after = duration(two.sample_time_s) if two.sample_time_s else f"no time ({new})"
        result.lines.append(f"  {name}: no time before ({old}), {after} after")
        return
    if not two.sample_time_s:
        result.lines.append(f"  {name}: {duration(one.sample_time_s)} before, no time after ({new})")
        gate, why = (result.undecided, "ended ok without a time") if two.ok else (result.slower, "no run ended ok")
        gate.append(f"{name}: {why}")
        return
    ratio = two.sample_time_s / one.sample_time_s
    interval = ratio_interval(two.interval, one.interval) if one.interval and two.interval else None
    before, after = (len(point.runs) - len(point.ok) for point in (one, two))
    failed = f", {before} and {after} attempts failed" if before or after else ""
    counts = f"n={len(one.sample_times)} and n={len(two.sample_times)}{failed}"
    decision = verdict(interval, "slower", "faster", "no difference shown") if interval else ""
    bounds = f"{decision}, {interval.low:.3f} to {interval.high:.3f}" if interval else "too few for an interval"
    times = f"{duration(one.sample_time_s)} -> {duration(two.sample_time_s)}"
    result.lines.append(f"  {name}: {times}, ratio {ratio:.3f} ({bounds}, {counts})")
    if limit is None:
        return
    if interval is None:
        result.undecided.append(f"too few repeats to decide (6 a side are needed): {name}: {counts}")
    elif interval.low > 1 + limit:
        result.slower.append(f"{name}: at least {interval.low:.3f} times the time")
    elif interval.high > 1 + limit:
        result.possible.append(f"{name}: up to {interval.high:.3f} times the time")


def _name(group: Group) -> str:
    row = group[0].row
    where = devices(row["gpus"] or 0, row["device"])
    return f"{row['framework']}, {row['model']}, {row['loader']}, {where}, batch {row['global_batch']}"
