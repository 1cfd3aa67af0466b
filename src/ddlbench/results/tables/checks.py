"""What makes numbers doubtful. Marks are the reasons to doubt one measurement; they are explained below the table.
Warnings name comparable runs that differ where they should agree, efficiencies above 100 %, and times that change
during the campaign."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import itemgetter
from statistics import median

from ddlbench.measure.marks import MARKS, other_updates
from ddlbench.record.fingerprint import of_the_launch
from ddlbench.results.rows import OWN, PUBLISHED, Row, group_by
from ddlbench.results.tables.measurement import Measurement, duration
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.stats import median_interval, ratio_interval, verdict
from ddlbench.texts import counted, first_few, shortened

# Columns of runs.csv that the framework must not change: what it starts from, how much it does, at which rates.
SHARED = ("weights_hash_start", "samples", "updates", "dropped_samples_per_epoch", "lr_first", "lr_last")
KEYS_SHOWN = 5
RUNS_SHOWN = 4
LONGEST_VALUE = 60  # letters; the names of two CPUs may differ only in the last ones
ROUNDING = 1e-9
FEWEST = 6  # runs with repeats: two in each third
MARKS_SHOWN = 20
LONGEST_MARKS = 400


def marks_of(run: Row) -> dict[str, str]:
    """The marks of a row of runs.csv, their texts by their names: those of the record, and those for a reference, other
    updates, ranks that differ and a straggler. The text on a straggler says which rank it is."""
    marks = {name: name for name in (run["marks"] or "").split("; ") if name}
    if run["reference"]:
        marks["reference"] = f"reference: {run['reference']}"
    late = run["staleness_max"] or run["staleness_theoretical_max"]
    if late or other_updates(run["framework_facts"] or ""):
        marks["other updates"] = "other updates"
    if run["ranks_differ"]:
        marks["ranks differ"] = "ranks differ"
    if run["straggler_rank"] is not None:
        marks["straggler"] = f"straggler {straggler(run)}"
    return marks


def straggler(run: Row) -> str:
    """The straggler of a run that has one: "rank 1 on node7"."""
    return f"rank {run['straggler_rank']}" + (f" on {run['straggler_host']}" if run["straggler_host"] else "")


def marks_explained(rows: Sequence[Measurement]) -> list[str]:
    """The marks behind each number, with how many runs have them, and then the meaning of each mark."""
    texts = {row.marks_number: row["marks"] for row in rows if row.marks_number}
    lines = [f"{number} {shortened(text, LONGEST_MARKS)}" for number, text in texts.items()]
    names = {name for row in rows for name in row.mark_names}
    return [
        *first_few(lines, MARKS_SHOWN, "more: see marks in scaling.csv"),
        *(f"{name}: {meaning}" for name, meaning in MARKS.items() if name in names),
    ]


def unknown_stragglers(rows: Sequence[Measurement]) -> Iterator[str]:
    """A sentence with the number of own measurements without a search for stragglers, and one on that on the CPU."""
    ended = [row for row in rows if row["status"] == "ok" and row["origin"] == OWN]
    trained = [row for row in ended if (row["gpus"] or 0) > 1 and row["mode"] != "loader"]
    measured = {row["measurement"]: row for row in trained}.values()
    if unknown := sum(row["own_step_s"] is None for row in measured):
        yield (
            f"stragglers: not looked for in {unknown} of {len(measured)} measurements on several ranks, whose own "
            "steps are not known: profile=true measures them"
        )
    if any(row["own_step_source"] == "thread" for row in measured):
        yield (
            "stragglers on the CPU: by the time that ranks computed; one that sleeps or waits for a disk shows with "
            "profile=true alone"
        )


def differences(runs: Iterable[AttemptRow]) -> Iterator[str]:
    """A sentence for each column with several values among runs that ended ok and share comparison, global batch and
    number of epochs."""
    ended = [run for run in runs if run.ok]
    groups = group_by(ended, lambda run: (run.comparison, run.row["global_batch"], run.row["epochs_done"]))
    for group, column in product(groups.values(), SHARED):
        values = group_by(group, lambda run, column=column: run.row[column])
        values.pop(None, None)  # not recorded
        if len(values) > 1:
            short = {value: value[:12] if isinstance(value, str) else str(value) for value in values}  # of a hash
            named = [f"{short[value]}: {', '.join(sorted(set(map(_name, runs))))}" for value, runs in values.items()]
            where = f"{group[0].row['model']}, global batch {group[0].row['global_batch']}"
            yield f"not the same training: {where}, differs in {column} ({'; '.join(named)})"


def _name(run: AttemptRow) -> str:
    return f"{run.row['framework']} on {run.row['gpus']}"


def environments(runs: Iterable[AttemptRow], groups: Iterable[Sequence[AttemptRow]]) -> Iterator[str]:
    """A sentence for each comparison whose runs that ended ok differ in versions, switches or the kind of host. Another
    one for each measurement, in `groups`, whose repeats differ in something that does not separate them."""
    ended = [run for run in runs if run.ok and run.environment]
    for group in group_by(ended, lambda run: run.comparison).values():
        shared = [{k: v for k, v in run.environment.items() if not of_the_launch(k)} for run in group]
        if texts := _several(list(map(_name, group)), shared):
            yield f"not the same environment: {group[0].row['model']}, differs in {texts}"
    for group in groups:
        ended = [run for run in group if run.ok]
        if texts := _several([f"repeat {run.row['repeat']}" for run in ended], [run.noted for run in ended]):
            yield f"repeats are merged: {_name(ended[0])}, {ended[0].row['model']}, differ in {texts}"


def _several(names: Sequence[str], rows: Sequence[Row]) -> str | None:
    """The keys with several values, and for each value the names of the rows that have it; None without such a key."""
    texts: list[str] = []
    for key in sorted({key for row in rows for key in row}):
        pairs = [(row[key], name) for name, row in zip(names, rows, strict=True) if key in row]
        if all(value == pairs[0][0] for value, _ in pairs):
            continue
        groups = group_by(pairs, lambda pair: shortened(json.dumps(pair[0], default=str), LONGEST_VALUE))
        named = {value: first_few(sorted({name for _, name in same}), RUNS_SHOWN) for value, same in groups.items()}
        text = "; ".join(f"{value}: {', '.join(runs)}" for value, runs in named.items())
        texts.append(f"{key} ({text})")
    return ", ".join(first_few(texts, KEYS_SHOWN)) or None


def above_ideal(scaling: Iterable[Measurement]) -> list[str]:
    """A sentence for each efficiency above 100 %."""
    sentences: list[str] = []
    for row, own in product(scaling, (False, True)):
        column = "efficiency_vs_own_base" if own else "efficiency"
        value, low, base = row[column], row[f"{column}_low"], row.base(own)
        if base is None or value is None or value <= 1 + ROUNDING:
            continue
        published = f"{PUBLISHED}, {row['source']}: " if row["origin"] == PUBLISHED else ""
        framework = "" if "framework" in row.how.by else f"{row['framework']}, "
        name = f"{published}{framework}{row.name}, {row['model']}, {row.devices}, {row.scaling}"
        base_text = f"{base.name}, {duration(base.seconds)} a sample"
        doubt = f": is the base ({base_text}) slow for a reason of its own, such as memory or caches?"
        if low is None:
            doubt = f" (without an interval){doubt}"
        elif low <= 1:
            doubt = f", which its interval does not show: it begins at {100 * low:.1f} %"
        sentences.append(f"{name}: {column} of {100 * value:.1f} % is above 100 %{doubt}")
    return list(dict.fromkeys(sentences))


def drift(groups: Sequence[Sequence[AttemptRow]]) -> str | None:
    """Compare the last third of a campaign's runs, by start, with the first third. None below 6 runs with repeats.

    Only measurements with runs in both thirds are compared, each by its medians in them: the median of all repeats
    drifts, too. Nothing is dropped or corrected.
    """
    timed = list[tuple[str, int, float]]()  # start, number of the measurement, seconds a sample
    for number, group in enumerate(groups):
        rows = [run.row for run in group if run.ok and run.row["start"] and run.row["throughput_samples_per_s"]]
        if len(rows) > 1:
            timed += [(str(row["start"]), number, 1 / row["throughput_samples_per_s"]) for row in rows]
    timed.sort()
    if len(timed) < FEWEST:
        return None
    size = len(timed) // 3
    first, last = (group_by(third, itemgetter(1)) for third in (timed[:size], timed[-size:]))
    both = [(first[number], last[number]) for number in first if number in last]
    pairs = [([seconds for *_, seconds in before], [seconds for *_, seconds in after]) for before, after in both]
    if not pairs:
        return f"drift: no measurement has repeats in the first and in the last third of {len(timed)} repeated runs"
    changes = [median(after) / median(before) for before, after in pairs]
    change, interval = median(changes), median_interval(changes)
    text = f"drift: the last third of {len(timed)} repeated runs took {change:.3f} times the first third's time"
    if len(pairs) == 1:
        before, after = map(median_interval, pairs[0])
        interval = ratio_interval(after, before) if before and after else None
    count = f"{counted(len(pairs), 'measurement')} in both"
    if interval is None:
        return f"{text} ({count}, too few runs for an interval)"
    decision = verdict(interval, "slower", "faster", "no drift shown")
    return f"{text} ({interval.low:.3f} to {interval.high:.3f}, {count}: {decision})"
