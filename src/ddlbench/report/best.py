"""The first paragraph of a report: the fastest framework for each model and GPU count, and how certain that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddlbench.figures.panels import devices, duration, settings
from ddlbench.report.verdicts import row_name, sample_interval
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.stats import SMALLEST_N
from ddlbench.texts import first_few, shortened

PARAGRAPHS = 12
PLACES = 12  # GPU counts and batches of one paragraph
NAMED = 4  # frameworks without a clear difference
LONGEST_NAME = 60


@dataclass(frozen=True)
class Paragraph:
    """subject: the model and what else is common; sentences: one for each GPU count and batch."""

    subject: str
    sentences: list[str]


def best(scaling: Sequence[Row]) -> tuple[list[Paragraph], int]:
    """A paragraph for each group of comparable measurements, and the number of those without room.

    scaling: rows of scaling.csv, models marked
    """
    texts = settings(scaling)
    rows = list({row["measurement"]: row for row in scaling}.values())  # strong and weak scaling: two rows, one fact
    groups = group_by(rows, lambda row: (None if row["compared_by"] == "model" else row["model"], row["comparison"]))
    paragraphs: list[Paragraph] = []
    for group in groups.values():
        models = dict.fromkeys(str(row["model"]) for row in group)
        subject = ", ".join([*models, *filter(None, [texts[group[0]["measurement"]]])])
        paragraphs.append(Paragraph(subject, _sentences(group)))
    shown = [paragraph for paragraph in paragraphs if paragraph.sentences]
    return shown[:PARAGRAPHS], max(0, len(shown) - PARAGRAPHS)


def _sentences(rows: Sequence[Row]) -> list[str]:
    places = group_by(rows, lambda row: (row["gpus"] or 0, row["global_batch"] or 0))
    sentences = [_sentence(places[place], len(places) > 1) for place in sorted(places)]
    shown = [text for text in sentences if text]
    more = len(shown) - PLACES
    return [*shown[:PLACES], *([f"{more} more GPU counts and batches are in the table."] if more > 0 else [])]


def _sentence(rows: Sequence[Row], several: bool) -> str:
    """ "On 4 GPUs, 128 samples an update: ddp is the fastest, ..."; empty where nothing was measured."""
    timed = sorted((row for row in rows if row["sample_time_s"]), key=lambda row: row["sample_time_s"])
    if not timed:
        return ""
    first = rows[0]
    batch = f", {first['global_batch']} samples an update" if first["global_batch"] and several else ""
    where = f"On {devices(first['gpus'] or 0, first['device'])}{batch}"
    fastest, *others = timed
    rate = f"{1 / fastest['sample_time_s']:,.4g} samples/s"
    if not others:
        return f"{where}: {_name(fastest)} is the only one with a result, {rate} (n={fastest['runs_ok']})."
    return f"{where}: {_verdict(fastest, others, rate)}."


def _verdict(fastest: Row, others: Sequence[Row], rate: str) -> str:
    second = others[0]
    factor = f"{second['sample_time_s'] / fastest['sample_time_s']:.3g} times as fast as {_name(second)}"
    time = f"{duration(fastest['sample_time_s'])} a sample ({rate})"
    lead = f"{_name(fastest)} has the shortest median time, {time}, {factor}"
    interval, counts = sample_interval(fastest), f"n={fastest['runs_ok']} and n={second['runs_ok']}"
    if interval is None or sample_interval(second) is None:
        return f"{lead}, but with {counts} this is not certain: an interval needs {SMALLEST_N} repeats"
    equal = [row for row in others if (other := sample_interval(row)) is None or interval.overlaps(other)]
    if equal:
        names = ", ".join(first_few(equal, NAMED, text=_name))
        range_ = " to ".join(duration(fastest[f"sample_time_{end}_s"]) for end in ("low", "high"))
        return f"{lead}; no difference is shown between {_name(fastest)} and {names} (95 % interval {range_} a sample)"
    return f"{_name(fastest)} is the fastest, {rate}, {factor}; the 95 % intervals do not overlap ({counts})"


def _name(row: Row) -> str:
    return shortened(row_name(row), LONGEST_NAME)
