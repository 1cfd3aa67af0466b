"""Measurements put together as they are drawn: one panel a series of comparable ones, with its base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

from matplotlib.axes import Axes

from ddlbench.figures.plotting import family
from ddlbench.results.rows import Settings, group_by
from ddlbench.results.tables.labels import settings_text
from ddlbench.results.tables.measurement import Base, Measurement, devices, duration, named

Naming = Callable[[Measurement], str]
MOST_CURVES = 8  # of a panel that a reader can tell apart
_TITLES = ("mode", "loader", "data", "recipe", "precision", "device_model")


@dataclass(frozen=True)
class Panel:
    """Comparable measurements of one model and one kind of scaling.

    lines:        below the title
    base:         what the ratios start from, in words
    on_own_bases: whether ratios start from each curve's own base, not from the best single GPU
    curve_of:     the name of the curve that a row belongs to
    folded:       names of the curves that the panel has no room for
    """

    model: str
    lines: list[str]
    base: str
    rows: list[Measurement]
    on_own_bases: bool = False
    curve_of: Naming = attrgetter("curve")
    folded: tuple[str, ...] = ()

    @property
    def gpus(self) -> list[int]:
        return [row["gpus"] for row in self.rows]

    @property
    def device(self) -> str | None:
        return self.rows[0]["device"]

    @property
    def curves(self) -> dict[str, list[Measurement]]:
        """The rows of each curve, by its name."""
        return group_by(self.rows, self.curve_of)

    @property
    def curve_keys(self) -> list[tuple[str, str]]:
        """The value of the compared factor of each curve, which has one color, and the name of the curve."""
        return [(str(rows[0]["compared"]), name) for name, rows in self.curves.items()]

    def against_own_bases(self) -> Panel:
        """The panel with ratios to the own bases."""
        bases = {(base.name, base) for row in self.rows if (base := row.base(own=True))}
        fewest = "ranks" if self.device == "cpu" else "GPUs"
        compared = " and ".join(self.rows[0].how.by)
        text = f"base: each {compared}'s own fewest {fewest}" if bases else ""
        if len(bases) == 1:
            text = _base_text(bases.pop()[1], self.device)
        return replace(self, on_own_bases=True, base=text)


class Plot(NamedTuple):
    """A figure: the panels that have something of it, and how one is drawn. study: the name that a study gives it"""

    name: str
    panels: Sequence[Panel]
    draw: Callable[[Axes, Panel], None]
    study: str = ""


def _base_text(base: Base, device: str | None) -> str:
    return f"base: {base.name} on {devices(base.gpus, device)}, {duration(base.seconds)} a sample"


def panels(rows: Sequence[Measurement]) -> list[Panel]:
    """All panels, in the order of the table. Rows without a GPU count cannot be drawn. Ratios start from the best
    single GPU where a series has one, else from each framework's own base."""
    drawn = [row for row in rows if row["gpus"]]
    texts = panel_texts(drawn)
    shown: list[Panel] = []
    for series in group_by(drawn, lambda row: row.series).values():
        first, scalings = series[0], dict.fromkeys(row.scaling for row in series)
        title, lines = head(series, texts)
        panel = Panel(title, [first.scaling if len(scalings) == 1 else "", *lines], "", series)
        single = first.base(own=False)
        shown.append(replace(panel, base=_base_text(single, first["device"])) if single else panel.against_own_bases())
    return shown


def head(rows: Sequence[Measurement], texts: Mapping[str, str]) -> tuple[str, list[str]]:
    """The title of a panel with these rows and the lines below: what they share, and in what they differ. texts: of
    `panel_texts`"""
    # The models of a panel may differ in some of their sizes.
    first, *others = (row.settings["model_changed"] for row in rows)
    sizes = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    settings = dict.fromkeys(key for row in rows for key in row.settings["across"])
    lines = [
        ", ".join(filter(None, (settings_text(sizes), texts[rows[0]["measurement"]]))),
        f"rows differ in {', '.join(settings)}" if settings else "",
    ]
    return ", ".join(dict.fromkeys(str(row.model) for row in rows)), lines


def panel_texts(rows: Sequence[Measurement], variant: str = "variant") -> dict[str, str]:
    """For each measurement, what distinguishes its panel from the others of the same model, beside the model's sizes.
    variant: the column of further settings"""
    texts: dict[str, str] = {}
    for same in group_by(rows, lambda row: row.model).values():
        how = same[0].how
        shared = [name for name in ("framework", *_TITLES) if name not in (*how.by, *how.across)]
        values = {name: {row[name] for row in same if row[name]} for name in shared}
        shown = ["source", *(name for name in shared if len(values[name]) > 1 or "loader" in values[name])]
        for row in same:
            settings = {key: value for key, value in row.settings[variant].items() if key not in shown}
            named = ["loader alone" if row[name] == "loader" else str(row[name]) for name in shown if row[name]]
            texts[row["measurement"]] = ", ".join(filter(None, (*named, settings_text(settings))))
    return texts


def short_names(rows: Sequence[Measurement]) -> list[str]:
    """A name for each row of a panel: the value of the compared factor and, unless these values tell the curves apart,
    the settings that differ between rows."""
    settings = list[Settings]()
    for row in rows:
        # The layout without degrees of 1, unless all ranks share what the framework is named after.
        degrees = {key: degree for key, degree in row.settings["layout"].items() if degree != "1"}
        mixed = degrees if "dp" in degrees or len(degrees) > 1 else {}
        settings.append(mixed | row.axes | row.settings["knobs"] | row.settings["across"])
    differing = {key for one in settings for key in one if len({other.get(key) for other in settings}) > 1}
    last = Counter(key.rpartition(".")[2] for key in differing)
    short = {key: name if last[name := key.rpartition(".")[2]] == 1 else key for key in differing}
    shown = [{short[key]: value for key, value in one.items() if key in differing} for one in settings]
    names = [named(row["compared"], {}, values) for row, values in zip(rows, shown, strict=True)]
    values = [str(row["compared"]) for row in rows]
    return values if len(set(values)) == len(set(names)) else names


def measured(shown: Sequence[Panel], *columns: str) -> list[Panel]:
    """The panels with the rows that have a value in all columns."""
    return with_rows(shown, lambda row: all(row[column] is not None for column in columns))


def with_rows(shown: Sequence[Panel], wanted: Callable[[Measurement], bool]) -> list[Panel]:
    """The panels with the rows that are wanted, without those that have none, for quantities that are no ratios."""
    parts = [replace(panel, base="", rows=list(filter(wanted, panel.rows))) for panel in shown]
    return [panel for panel in parts if panel.rows]


def small_multiples(panel: Panel) -> list[Panel]:
    """The panel, or where it has more than MOST_CURVES curves one for each family of frameworks; where a family has too
    many, one for each framework; where a framework has too many, with its fastest ones."""
    parts = [panel]
    names: tuple[Naming, ...] = (lambda row: family(str(row["framework"])), lambda row: str(row["framework"]))
    for name in names:
        divided, parts = parts, list[Panel]()
        for part in divided:
            if len(part.curves) <= MOST_CURVES:
                parts.append(part)
                continue
            for text, rows in group_by(part.rows, name).items():
                lines = part.lines if text in part.lines else [*part.lines, text]
                parts.append(replace(part, lines=lines, rows=rows))
    shown = list[Panel]()
    for part in parts:
        curves = part.curves  # those without any seconds a sample come last
        order = sorted(curves, key=lambda text: min(row["sample_time_s"] or inf for row in curves[text]))
        rows = [row for row in part.rows if part.curve_of(row) in order[:MOST_CURVES]]
        shown.append(replace(part, rows=rows, folded=tuple(order[MOST_CURVES:])))
    return shown
