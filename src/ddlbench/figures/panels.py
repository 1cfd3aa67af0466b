"""Rows of scaling.csv put together as they are drawn: one panel a series of comparable rows, with its base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from ddlbench.figures.families import family
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.ratios import base_name

Naming = Callable[[Row], str]
MOST_CURVES = 8  # of a panel that a reader can tell apart
_TITLES = ("mode", "loader", "data", "recipe", "precision", "device_model")


class Base(NamedTuple):
    """What ratios start from: seconds a sample on a number of GPUs."""

    seconds: float
    gpus: int


@dataclass(frozen=True)
class Panel:
    """Comparable rows of one model and one kind of scaling.

    lines:        below the title
    base:         what the ratios start from, in words
    rows:         of scaling.csv
    repeats:      the rows of runs.csv that ended ok, by measurement
    on_own_bases: whether ratios start from each curve's own base, not from the best single GPU
    one_size:     whether all rows have one GPU count and batch, so that the names of curves need not tell them
    folded:       names of the curves that the panel has no room for
    """

    model: str
    lines: list[str]
    base: str
    rows: list[Row]
    repeats: Mapping[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    on_own_bases: bool = False
    one_size: bool = False
    folded: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The panel in one line."""
        return ", ".join([self.model, *filter(None, self.lines)])

    @property
    def gpus(self) -> list[int]:
        return [row["gpus"] for row in self.rows]

    @property
    def device(self) -> str | None:
        return self.rows[0]["device"]

    def base_of(self, row: Row) -> Base | None:
        """What the ratios of the row start from; None without such a measurement."""
        seconds = row["own_base_sample_time_s" if self.on_own_bases else "best_single_sample_time_s"]
        return Base(seconds, row["own_base_gpus"] if self.on_own_bases else 1) if seconds else None

    @property
    def has_ratios(self) -> bool:
        """Whether a row has a ratio that is not 1 by definition, as that of a base to itself."""
        timed = [row for row in self.rows if row["sample_time_s"]]
        return any(self.base_of(row) != (row["sample_time_s"], row["gpus"]) for row in timed)

    @property
    def own_bases_tell_more(self) -> bool:
        """Whether ratios to own bases are worth a figure beside those to the best single GPU."""
        compared = [row for row in self.rows if row["speedup_vs_own_base"] is not None]
        own = replace(self, on_own_bases=True)
        return any(self.base_of(row) != own.base_of(row) and row["own_base_gpus"] != row["gpus"] for row in compared)

    def against_own_bases(self) -> Panel:
        """The panel with ratios to the own bases."""
        return replace(self, on_own_bases=True, base=_own_bases_text(self))


def panels(scaling: Sequence[Row], runs: Iterable[Row]) -> list[Panel]:
    """All panels, in the order of the table. Rows without a GPU count cannot be drawn."""
    repeats = group_by((run for run in runs if run["status"] == "ok"), lambda run: run["measurement"])
    rows = [row for row in scaling if row["gpus"]]
    texts = settings(rows)
    series = group_by(rows, _series).values()
    return [_panel(mates, texts[mates[0]["measurement"]], repeats) for mates in series]


def _series(row: Row) -> tuple[Any, ...]:
    model = None if row["compared_by"] == "model" else row["model"]
    return model, row["comparison"], row["scaling"], batch_size(row)


def _panel(rows: list[Row], text: str, repeats: Mapping[str, list[Row]]) -> Panel:
    """Ratios start from the best single GPU where the series has one, else from each framework's own base."""
    models, first = dict.fromkeys(str(row["model"]) for row in rows), rows[0]
    panel = Panel(", ".join(models), [scaling_text(first), text], "", rows, repeats)
    single_s = first["best_single_sample_time_s"]
    if not single_s:
        return panel.against_own_bases()
    return replace(panel, base=_base_text(first["device"], base_name(first, "best_single"), 1, single_s))


def settings(scaling: Sequence[Row], variant: str = "variant") -> dict[str, str]:
    """For each measurement, what distinguishes its panel from the others of the same model. variant: the column of
    further settings"""
    texts: dict[str, str] = {}
    for rows in group_by(scaling, lambda row: row["model"]).values():
        fixed = () if rows[0]["compared_by"] == "framework" else ("framework",)
        shared = [name for name in (*fixed, *_TITLES) if name != rows[0]["compared_by"]]
        values = {name: {row[name] for row in rows if row[name]} for name in shared}
        shown = ["model_changed", *(name for name in shared if len(values[name]) > 1 or "loader" in values[name])]
        for row in rows:
            texts[row["measurement"]] = ", ".join(str(row[name]) for name in (*shown, variant) if row[name])
    return texts


def curves(panel: Panel) -> list[list[Row]]:
    """The rows of each framework and its knobs."""
    return list(group_by(panel.rows, curve_name).values())


def small_multiples(panel: Panel, name: Naming | None = None) -> list[Panel]:
    """The panel, or where it has more than MOST_CURVES curves one for each family of frameworks; where a family has too
    many, one for each framework; where a framework has too many, with its fastest ones.

    name: of the curve that a row belongs to (default: curve_name)
    """
    named = name or curve_name
    parts = _divided(panel, lambda row: family(str(row["framework"])), named)
    single = [part for group in parts for part in _divided(group, lambda row: str(row["framework"]), named)]
    return [_fastest(part, named) for part in single]


def _divided(panel: Panel, key: Naming, name: Naming) -> list[Panel]:
    if len(group_by(panel.rows, name)) <= MOST_CURVES:
        return [panel]
    return [_part(panel, text, rows) for text, rows in group_by(panel.rows, key).items()]


def _part(panel: Panel, text: str, rows: list[Row]) -> Panel:
    return replace(panel, lines=panel.lines if text in panel.lines else [*panel.lines, text], rows=rows)


def _fastest(panel: Panel, name: Naming) -> Panel:
    """With the curves of the shortest seconds a sample; those without any come last."""
    curves = group_by(panel.rows, name)
    order = sorted(curves, key=lambda text: min(row["sample_time_s"] or inf for row in curves[text]))
    kept = set(order[:MOST_CURVES])
    return replace(panel, rows=[row for row in panel.rows if name(row) in kept], folded=tuple(order[MOST_CURVES:]))


def curve_name(row: Row) -> str:
    return f"{row['compared']} ({row['knobs']})" if row["knobs"] else str(row["compared"])


def curve_key(row: Row) -> tuple[str, str]:
    """The value of the compared factor, which has one colour in all figures, and the name of the curve."""
    return str(row["compared"]), curve_name(row)


def batch_size(row: Row) -> float | None:
    """What stays equal along the row's kind of scaling: samples a GPU, or an update."""
    return row["batch_per_gpu" if row["scaling"] == "weak" else "global_batch"]


def scaling_text(row: Row) -> str:
    """ "weak scaling, 32 samples a GPU"."""
    size = batch_size(row)
    kind = {"weak": "weak scaling", "strong": "strong scaling", "single": "one GPU count"}[row["scaling"]]
    per = f"a {devices(1, row['device']).split()[1]}" if row["scaling"] == "weak" else "an update"
    return f"{kind}, {size:g} samples {per}" if size is not None else kind


def _own_bases_text(panel: Panel) -> str:
    bases = {
        (base_name(row, "own_base"), row["own_base_gpus"], row["own_base_sample_time_s"])
        for row in panel.rows
        if row["own_base_gpus"]
    }
    if len(bases) == 1:
        return _base_text(panel.device, *bases.pop())
    fewest = "ranks" if panel.device == "cpu" else "GPUs"
    return f"base: each {panel.rows[0]['compared_by']}'s own fewest {fewest}" if bases else ""


def _base_text(device: str | None, name: str, gpus: int, seconds: float) -> str:
    return f"base: {name} on {devices(gpus, device)}, {duration(seconds)} a sample"


def devices(count: int, device: str | None) -> str:
    """ "1 GPU", "4 GPUs", "2 ranks"; a count of 0 is one that is not known."""
    if not count:
        return f"an unknown number of {'ranks' if device == 'cpu' else 'GPUs'}"
    return f"{count} {'rank' if device == 'cpu' else 'GPU'}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds in three significant digits and a fitting unit."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6))
    return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
