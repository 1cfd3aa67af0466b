"""`--study NAME`: the figures of a paper that a study lists, drawn from its cells, and which cells each one lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

from ddlbench.config.choices import choices, published
from ddlbench.config.keys import Train, added_later, written
from ddlbench.errors import UserError
from ddlbench.figures.figures import Drawing, drawing_of, plots_of
from ddlbench.figures.panels import Plot
from ddlbench.results.rows import group_by
from ddlbench.results.tables.measurement import Measurement
from ddlbench.results.tables.merge import Comparison
from ddlbench.results.tables.tables import Tables
from ddlbench.sweep.study import Study
from ddlbench.sweep.study_entries import SCALING, Figure, Plain, matches

NEEDS = {
    "step_seconds": ": run with profile=true",
    "breakdown": ": run with profile=true",
    "schedule": ": run a pipeline with profile=true",
    "predicted_parts": ": give --predict CLUSTER, and runs on one device",
}
GROUPS = ("framework", "model", "loader", "data", "recipe")
FIXED = ("framework", "model", "loader")  # choices of a study that its cells have; recipe and data may be changed
OF_DATA = ("num_classes", "vocab_size")  # sizes of a model that follow from the data


def comparison(study: Study, by: tuple[str, ...] = ()) -> Comparison:
    """How the rows of a study are compared. A setting of some cells may be missing where only others have run: VGG has
    no tied weights. by: of a figure; (): those of the study"""
    given = {*study.axes, *study.keys, *(key for _, keys in study.settings for key in keys)}
    return Comparison(by or study.by, study.across, tuple(name for name in study.across if name in given))


def draw_study(study: Study, tables_of: Callable[[Comparison], Tables]) -> Drawing:
    """The figures by STUDY_NUMBER, with a note for each that lacks cells, and one for measurements of other models.
    UserError if none can be drawn, or for a kind of figure that does not exist. tables_of: the results, compared in a
    given way"""
    points = list(study.points())
    plots, notes, others = list[Plot](), list[str](), dict[str, str]()
    for number, figure in study.figures.items():
        tables, name = tables_of(comparison(study, figure.by)), f"{study.name}_{number}"
        trained = {row: _point(study, row) for row in tables.measurements if row["mode"] == "train"}
        wanted = [point for point in points if matches(figure.where, point)]
        placed = [row for row, point in trained.items() if point in wanted]
        differing = {row: _differing(study, row, trained[row]) for row in placed}
        others |= {row["measurement"]: key for row, key in differing.items() if key}
        drawn = [row for row, key in differing.items() if not key]
        ended = [trained[row] for row in drawn if row["status"] == "ok"]
        missing = [point for point in wanted if point not in ended]
        if figure.best:  # each curve on its fastest GPU count
            fine = (row for row in drawn if row["status"] == "ok")
            curves = group_by(fine, lambda row: (row["comparison"], row.curve))
            drawn = [min(curve, key=lambda row: row["sample_time_s"] or inf) for curve in curves.values()]
        plots.append(_plot(figure, plots_of(tables, drawn), name))
        if missing:
            cells = ", ".join(_cells(missing))
            notes.append(f"{name}: {len(missing)} of {len(wanted)} cells have no run that ended ok: {cells}")
        if not plots[-1].panels and len(missing) < len(wanted):
            notes.append(f"{name}: no run has what {figure.kind} shows{NEEDS.get(figure.kind, '')}")
    if others:
        keys = ", ".join(sorted(set(others.values())))
        notes.insert(0, f"{len(others)} measurements are not of this study: they differ from its cells in {keys}")
    if not any(plot.panels for plot in plots):
        raise UserError(f"--study {study.name}: no figure can be drawn: {'; '.join(notes) or 'it lists none'}")
    return drawing_of(plots, notes)


def _plot(figure: Figure, plots: Iterable[Plot], name: str) -> Plot:
    """The plot of a figure's kind, with its name, and above its first panel the paper's text. The plots after it are
    not made. UserError if there is none."""
    others = list[str]()
    for plot in plots:
        if plot.name == figure.kind:
            shown = list(plot.panels)
            if shown and figure.printed:
                shown[0] = replace(shown[0], lines=[*shown[0].lines, f"the paper: {figure.printed}"])
            return plot._replace(study=name, panels=shown)
        others.append(plot.name)
    raise UserError(f"{name}: kind {figure.kind} does not exist: choose one of {', '.join(others)}")


def _point(study: Study, row: Measurement) -> dict[str, Any]:
    """The values of a measurement on the study's axes; an axis whose key the run's framework or loader lacks has
    none. A record that is older than a key of `train` has the value that stands for the behavior before it."""
    keys = {**added_later(Train, "train."), **row.options}
    weak = keys.get(SCALING["weak"]) is not None
    special = {
        "gpus": row["gpus"],
        "scaling": "weak" if weak else "strong",
        "batch": keys.get(SCALING["weak" if weak else "strong"]),
    }
    values = {axis: special.get(axis, keys.get(f"{axis}.name" if axis in GROUPS else axis, "")) for axis in study.axes}
    return {axis: value for axis, value in values.items() if value != ""}


def _differing(study: Study, row: Measurement, point: Plain) -> str | None:
    """The first key of the model, or choice that the study fixes, in which a measurement differs from its cell."""
    keys = study.keys_of(point)
    model = keys["model"]
    sizes = published("model", model) if model in choices("model") else {}
    expected = {f"{group}.name": keys[group] for group in FIXED if group in keys}
    expected |= {f"model.{key}": size for key, size in sizes.items() if key not in OF_DATA}
    expected |= {key: value for key, value in keys.items() if key.startswith("model.")}
    return next((key for key, value in expected.items() if row.options.get(key, value) != value), None)


def _cells(points: Iterable[Plain]) -> Iterator[str]:
    """All cells, those that differ only in the number of GPUs as one: "ddp resnet50 gpus=2,4"."""
    for same in group_by(points, lambda point: tuple((key, point[key]) for key in point if key != "gpus")).values():
        values = {**same[0], "gpus": ",".join(str(point["gpus"]) for point in same)}
        yield " ".join(str(value) if key in GROUPS else f"{key}={written(value)}" for key, value in values.items())
