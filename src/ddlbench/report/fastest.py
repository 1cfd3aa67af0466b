"""Which framework is the fastest, in words: the first paragraph of a report for each model and GPU count, and sentences
on all comparisons, each as certain as the repeats allow (Hoefler and Belli)."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.figures.panels import head, panel_texts
from ddlbench.results.rows import group_by
from ddlbench.results.tables.measurement import Measurement, devices, duration
from ddlbench.results.tables.stats import LEVEL, NONE_SHOWN, SMALLEST_N, ratio_interval
from ddlbench.texts import first_few, limited

PARAGRAPHS = 12
PLACES = 12  # GPU counts and batches of one paragraph
NAMED = 4  # frameworks without a clear difference
Paragraph = tuple[str, list[str]]


def best(measurements: Sequence[Measurement]) -> tuple[Sequence[Paragraph], int]:
    """A paragraph for each group of comparable measurements, and the number of those without room. A paragraph has the
    model and what else is common, and a sentence for each GPU count and batch."""
    texts = panel_texts(measurements)
    results = [row for row in measurements if not row.is_reference]
    rows = {row["measurement"]: row for row in results}.values()  # strong and weak scaling: two rows, one fact
    paragraphs: list[Paragraph] = []
    for group in group_by(rows, lambda row: row["comparison"]).values():
        title, lines = head(group, texts)
        subject = ", ".join(filter(None, (title, *lines)))
        places = group_by(
            group,
            lambda row: (row["gpus"] or 0, row["nodes"] or 0, 0 if row.any_scaling else row["global_batch"] or 0),
        )
        sentences = [_sentence(places[place], len(places) > 1) for place in sorted(places)]
        more = "more GPU counts and batches are in the table."
        paragraphs.append((subject, first_few(list(filter(None, sentences)), PLACES, more)))
    return limited([paragraph for paragraph in paragraphs if paragraph[1]], PARAGRAPHS)


def digits(value: float, count: int = 3) -> str:
    """A number with `count` significant digits, and with all of those before its point: "1.98", "1,024"."""
    return f"{value:,.0f}" if value >= 10**count - 0.5 else f"{value:,.{count}g}"


def _sentence(rows: Sequence[Measurement], several: bool) -> str:
    """ "On 4 GPUs, 128 samples an update: ddp is the fastest, ..."; empty where nothing was measured."""
    timed = sorted((row for row in rows if row["sample_time_s"]), key=lambda row: row["sample_time_s"])
    if not timed:
        return ""
    first = rows[0]
    one_batch = several and first["global_batch"] and not first.any_scaling
    batch = f", {first['global_batch']} samples an update" if one_batch else ""
    where = f"On {first.place}{batch}"
    fastest, *others = timed
    name = _named(fastest)
    rate = f"{digits(1 / fastest['sample_time_s'], 4)} samples/s"
    if not others:
        return f"{where}: {name} is the only one with a result, {rate} (n={fastest['runs_timed']})."
    second = others[0]
    factor = f"{digits(second['sample_time_s'] / fastest['sample_time_s'])} times as fast as {_named(second)}"
    time = f"{duration(fastest['sample_time_s'])} a sample ({rate})"
    lead = f"{where}: {name} has the shortest median time, {time}, {factor}"
    if second.judged_with != fastest.judged_with:
        return f"{lead}; no verdict, because they differ in more than the {fastest['compared_by']}."
    interval, counts = fastest.interval, f"n={fastest['runs_timed']} and n={second['runs_timed']}"
    if interval is None or second.interval is None:
        return f"{lead}, but with {counts} this is not certain: an interval needs {SMALLEST_N} repeats."
    judged = [row for row in others if row.judged_with == fastest.judged_with]
    equal = [row for row in judged if row.interval is None or ratio_interval(row.interval, interval).low <= 1]
    if equal:
        names = ", ".join(first_few(equal, NAMED, text=_named))
        range_ = " to ".join(duration(fastest[f"sample_time_{end}_s"]) for end in ("low", "high"))
        return f"{lead}; no difference is shown between {name} and {names} (95 % interval {range_} a sample)."
    among = "" if len(judged) == len(others) else f" of those that differ in the {fastest['compared_by']} alone"
    certain = f"the 95 % intervals do not overlap ({counts})"
    return f"{where}: {name} is the fastest{among}, {rate}, {factor}; {certain}."


def _named(row: Measurement) -> str:
    return f"{row.name} (other updates)" if "other updates" in row.mark_names else row.name


def comparisons(measurements: Sequence[Measurement]) -> list[str]:
    """A sentence for each model, batch and GPU count: the fastest measurement against the others; a sentence for the
    ratios to the best single GPU; at the end the number of comparisons, because each may be wrong by chance."""
    timed = [row for row in measurements if row["sample_time_s"] and row["gpus"] and not row.is_reference]
    # With scaling in --across a measurement has a row for each kind in one group: the row with a verdict counts.
    by_verdict = sorted(timed, key=lambda row: bool(row["speedup_verdict"]))
    counted = set({(row["measurement"], *row.series): row for row in by_verdict}.values())
    rows = [row for row in timed if row in counted]
    groups = group_by(rows, lambda row: (*row.series, row["gpus"], row["nodes"]))
    shared = panel_texts(measurements)
    sentences, decided = list[str](), set[tuple[str, str]]()  # strong and weak scaling: two sentences, one comparison
    for group in groups.values():
        fastest, *others = sorted(group, key=lambda row: row["sample_time_s"])
        models = ", ".join(dict.fromkeys(str(row.model) for row in group))
        scaling = "" if fastest.any_scaling else fastest.scaling
        where = ", ".join(filter(None, (models, shared[fastest["measurement"]], scaling, fastest.place)))
        if others:
            sentences.append(f"{where}: {'; '.join(_difference(fastest, other) for other in others)}")
        based = [row for row in group if row["speedup_low"] is not None and row["gpus"] > 1]
        if based:
            base = f"{fastest['best_single_compared']} on {devices(1, fastest['device'])}"
            texts: list[str] = []
            for row in based:
                ends = f"({digits(row['speedup_low'])} to {digits(row['speedup_high'])})"
                result = f" is {digits(row['speedup'])} times as fast"
                if row["speedup_verdict"] == NONE_SHOWN:
                    result = f": {NONE_SHOWN}"
                elif not row["speedup_verdict"]:
                    result = f": speedup {digits(row['speedup'])} without a verdict, because they differ in more,"
                texts.append(f"{row.name}{result} {ends}")
            sentences.append(f"{where}, against {base}: {'; '.join(texts)}")
        decided |= {(row["measurement"], row.scaling) for row in based}
        judged = [other for other in others if other.judged_with == fastest.judged_with]
        pairs = [(fastest, other) for other in judged if fastest.interval and other.interval]
        decided |= {(one["measurement"], other["measurement"]) for one, other in pairs}
    if (count := len(decided)) > 1:
        sentences.append(
            f"{count} comparisons with intervals, not corrected for their number: each is wrong with probability "
            f"{200 * (1 - LEVEL):.0f} % at most, so by chance up to about {2 * (1 - LEVEL) * count:.1f} of them"
        )
    return sentences


def _difference(fast: Measurement, slow: Measurement) -> str:
    names = f"{fast.name} and {slow.name}"
    times = f"{duration(fast['sample_time_s'])} and {duration(slow['sample_time_s'])} a sample"
    if fast.judged_with != slow.judged_with:
        return f"{names} took {times}: no verdict, because they differ in more than the {fast['compared_by']}"
    if fast.interval is None or slow.interval is None:
        counts = f"n={fast['runs_timed']} and n={slow['runs_timed']}"
        return f"{names} took {times} ({counts}, no 95 % CI): too few repeats to tell them apart"
    effect = ratio_interval(slow.interval, fast.interval)
    ends = f"{digits(effect.low)} to {digits(effect.high)}"
    if effect.low <= 1:
        return f"no difference shown between {names}: {times}, their ratio is {ends}"
    factor = digits(slow["sample_time_s"] / fast["sample_time_s"])
    return f"{fast.name} is {factor} times as fast as {slow.name}: {times}, the ratio is {ends}"
