"""What others published: the efficiency of their measurements by strategy, GPU and source; and with `--baseline
published` the numbers that papers print beside the measured efficiency and communication."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from operator import itemgetter
from typing import Any, cast

from matplotlib.axes import Axes

from ddlbench.figures import plotting
from ddlbench.figures.curves import EFFICIENCY, draw, plot_by_line
from ddlbench.figures.panels import Panel, Plot, measured
from ddlbench.figures.plotting import MARKERS, Looks, looks_of
from ddlbench.results.reading.published import gpu_family
from ddlbench.results.rows import OWN, PUBLISHED, Row, group_by
from ddlbench.results.tables.measurement import Measurement
from ddlbench.texts import first_few

PRINTED: dict[str, Any] = tomllib.loads(files("ddlbench.figures").joinpath("published.toml").read_text("utf-8"))
AUTHORS = {name: source["text"].partition(",")[0] for name, source in PRINTED["sources"].items()}  # "Aach et al. 2023"
GREY = "#7a7a7a"
CPU_AXIS = "ranks (CPU); printed values: GPUs"
ARROW = 0.06  # its length, as an efficiency
BY_SOURCE = "efficiency over its base (%)"
THIN: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.0}
PREDICTED: dict[str, Any] = {
    "linestyle": "", "marker": "_", "markersize": 11, "color": "black", "label": "predicted from its base", "zorder": 3,
}  # fmt: skip
MODELS_SHOWN = 4
SERIES = (  # columns that are equal for the points of a line
    "model", "device_model", "framework_library", "precision", "loader", "own_base_gpus", "own_base_sample_time_s",
)  # fmt: skip


def efficiencies(*models: str) -> list[Row]:
    """Printed efficiencies of models against 4 GPUs of the same framework. relation: "=", or "<" or ">" where the text
    gives only a limit"""
    return [row for row in PRINTED["efficiency"] if row["model"] in models]


def shares(*models: str) -> dict[str, list[tuple[int, float, float, float]]]:
    """By loader: GPUs, and the shares of the kernels' time in communication, data loading and computation (0 to 1).
    None are printed for several models together."""
    table = PRINTED["kernel_time"].get(models[0], {}) if len(models) == 1 else {}
    return {loader: [(row[0], *(part / 100 for part in row[1:])) for row in rows] for loader, rows in table.items()}


def notes(shown: Sequence[Panel]) -> list[str]:
    """A line for each panel without printed numbers of its model or models; the papers and their machines, the place of
    each number, and statements that give no number."""
    lines = [
        f"no printed number is drawn beside {', '.join(models)}"
        for models in dict.fromkeys(map(models_of, shown))
        if not (efficiencies(*models) or shares(*models))
    ]
    lines += [f"{name}: {source['text']}; {source['machine']}" for name, source in PRINTED["sources"].items()]
    for (source, place), rows in group_by(PRINTED["efficiency"], itemgetter("source", "place")).items():
        texts = [
            "efficiency of {model}, {framework}, {loader}, {gpus} GPUs {relation} ".format(**row)
            + f"{100 * row['value']:g} %"
            for row in rows
        ]
        lines.append(f"{source}, {place}: {'; '.join(texts)}")
    lines += [f"{row['source']}, {row['place']}: {row['model']}: {row['text']}" for row in PRINTED["statement"]]
    return [f"published: {line}" for line in lines]


def plots(
    shared: Sequence[Panel], all_panels: Sequence[Panel], looks: Looks, of_all_loaders: bool = True
) -> list[Plot]:
    """The panels, against own bases, whose model has printed numbers, whatever its sizes. of_all_loaders: whether
    efficiencies of loaders that a panel does not have are drawn"""
    efficiency = [
        replace(panel.against_own_bases(), base="own base; grey: printed, base 4 GPUs")
        for panel in shared
        if efficiencies(*models_of(panel))
    ]
    communication = [
        replace(panel.against_own_bases(), base="grey: printed shares of the kernels' time")
        for panel in measured(shared, "comm_share") or all_panels
        if shares(*models_of(panel))
    ]
    return [
        Plot("published_efficiency", efficiency, partial(draw_efficiency, looks=looks, of_all_loaders=of_all_loaders)),
        Plot("published_communication", communication, partial(draw_communication, looks=looks)),
    ]


def models_of(panel: Panel) -> tuple[str, ...]:
    """The models of a panel, whatever their sizes; several where it compares models."""
    names = (row["model"] if row["origin"] == OWN else row.model for row in panel.rows)
    return tuple(dict.fromkeys(map(str, names)))


def draw_efficiency(axes: Axes, panel: Panel, looks: Looks, of_all_loaders: bool) -> None:
    """Draw measured efficiencies with lines, and printed ones as grey points. An arrow points away from a printed limit
    to the side on which the value lies."""
    loaders, models = {row["loader"] for row in panel.rows}, models_of(panel)
    points = [row for row in efficiencies(*models) if of_all_loaders or row["loader"].partition(",")[0] in loaders]

    def label(row: Row) -> str:
        sign = "" if row["relation"] == "=" else f", {row['relation']} {100 * row['value']:g} %"
        name = f"{AUTHORS[row['source']]}: {row['framework']}, {row['loader']}{sign}"
        return name if len(models) == 1 else f"{row['model']}, {name}"

    quantity = replace(EFFICIENCY, label="efficiency (% of ideal speedup)")
    draw(axes, panel, looks, quantity, [row["gpus"] for row in points])
    for number, (name, same) in enumerate(group_by(points, label).items()):
        xs, ys = [row["gpus"] for row in same], [row["value"] for row in same]
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(xs, ys, color=GREY, marker=marker, fillstyle="none", linestyle="", label=plotting.label(name))
        if same[0]["relation"] != "=":
            above = same[0]["relation"] == ">"
            axes.errorbar(xs, ys, ARROW, fmt="none", color=GREY, elinewidth=1, lolims=above, uplims=not above)
    if panel.device == "cpu":
        axes.set_xlabel(CPU_AXIS)


def draw_communication(axes: Axes, panel: Panel, looks: Looks) -> None:
    """Communication as a share of all kernels' time as printed, and of the profiled window as measured here."""
    printed = shares(*models_of(panel))
    profiled = [row for row in panel.rows if row["comm_share"] is not None]
    counts = [row["gpus"] for row in profiled] + [row[0] for rows in printed.values() for row in rows]
    plotting.gpu_axis(axes, counts, panel.device, log=True)
    for name, rows in group_by(profiled, panel.curve_of).items():
        look = looks[rows[0].curve_key]
        style: dict[str, Any] = {"color": look.color, "label": plotting.label(name), **look.shape}
        plot_by_line(axes, {row: row["comm_share"] for row in rows}, style)
    table = PRINTED["kernel_time"]
    where = f"{AUTHORS[table['source']]}, {table['place']}: {table['framework']}"
    for number, (loader, rows) in enumerate(printed.items()):
        axes.plot(
            [row[0] for row in rows], [row[1] for row in rows], color=GREY, marker=MARKERS[number],
            fillstyle="none", linestyle="--", linewidth=1, label=f"{where}, {loader}",
        )  # fmt: skip
    values = [row["comm_share"] for row in profiled] + [row[1] for rows in printed.values() for row in rows]
    plotting.value_axis(axes, values, "communication (% of time)", percents=True, log=False)
    if panel.device == "cpu":
        axes.set_xlabel(CPU_AXIS)


def by_source(shown: Sequence[Panel]) -> Plot:
    """A panel for each family of models ("ResNet" of "ResNet-50 v1.5"), with the published measurements on more GPUs
    than their base."""
    rows = {row["measurement"]: row for panel in shown for row in panel.rows if row["origin"] == PUBLISHED}
    scaled = [row for row in rows.values() if row["efficiency_vs_own_base"] and row["gpus"] > row["own_base_gpus"]]
    families = group_by(scaled, lambda row: re.split(r"[-_ ]", str(row["model"]), maxsplit=1)[0])
    panels: list[Panel] = []
    for family, same in sorted(families.items()):
        models = first_few(sorted({str(row["model"]) for row in same}), MODELS_SHOWN)
        panels.append(Panel(f"{family} ({PUBLISHED})", [", ".join(models)], "", same))
    return Plot("efficiency_by_source", panels, partial(_draw_by_source, looks=looks_of(map(_key, scaled))))


def _draw_by_source(axes: Axes, panel: Panel, looks: Looks) -> None:
    """A line for each series, from its base at 100 %; those of one strategy, GPU and source look the same."""
    counts = [count for row in panel.rows for count in (row["gpus"], row["own_base_gpus"])]
    plotting.gpu_axis(axes, counts, panel.device, log=True)
    for key, rows in group_by(panel.rows, _key).items():
        look, name = looks[key], plotting.label(key[1])
        for series in group_by(rows, lambda row: tuple(row[column] for column in SERIES)).values():
            ends = {(series[0]["own_base_gpus"], 1.0)}
            points = sorted(ends | {(row["gpus"], row["efficiency_vs_own_base"]) for row in series})
            style: dict[str, Any] = {"color": look.color, "label": name, **look.shape, **THIN}
            axes.plot([gpus for gpus, _ in points], [value for _, value in points], **style)
    values = [1.0, *(row["efficiency_vs_own_base"] for row in panel.rows)]
    if rows := [row for row in panel.rows if row["predicted_error"] is not None]:
        predicted = [row["efficiency_vs_own_base"] / (1 + row["predicted_error"]) for row in rows]
        axes.plot([row["gpus"] for row in rows], predicted, **PREDICTED)
        values += predicted
    axes.axhline(1.0, **cast(Any, plotting.IDEAL))
    plotting.value_axis(axes, values, BY_SOURCE, percents=True, log=False)


def _key(row: Measurement) -> tuple[str, str]:
    """The strategy, which has one color, and the name in the legend."""
    gpu = gpu_family(str(row["device_model"])) or row["device_model"]
    return str(row["framework"]), f"{row['framework']}, {gpu}, {row['source']}"
