"""Learning curves over epochs and over time: top-1 for images, perplexity for text, never on one axis.

A line is the median over the seeds of runs that are otherwise equal, a band is their range, a darker band the interval
of the median from six seeds on. Repeats of one seed count once; where there is one seed alone the band is their range.
A run that did not end ok is a thin line of its own with a cross at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isclose
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ddlbench.figures import plotting
from ddlbench.figures.panels import Panel, Plot, head, panel_texts, small_multiples
from ddlbench.figures.plotting import Looks, looks_of, numbered
from ddlbench.results.reading.cells import plain
from ddlbench.results.rows import group_by
from ddlbench.results.tables.measurement import Measurement


class Metric(NamedTuple):
    """A metric of epochs.csv. label: of its axis; share: whether it is a share, shown in percent"""

    column: str
    label: str
    share: bool = False


METRICS = {
    "accuracy": Metric("val_top1", "top-1 (% of validation samples)", share=True),
    "perplexity": Metric("val_perplexity_token", "validation perplexity per token"),
}
RATE = Metric("lr_last", "learning rate")  # of the last update of an epoch
UNITS = (("h", 3600.0), ("min", 60.0))
SQUASHED = 20  # a curve that falls by more than this factor has no visible end on a linear axis
MARKERS = 12  # about so many are on a line
SMALL: dict[str, Any] = {"markersize": 5, "markeredgewidth": 0.5, "linewidth": 1.2}
EQUAL = 1e-3  # relative difference of curves that hide each other
FAILED_SHOWN = 8  # runs of a panel that did not end ok
PLACES = ("epoch", "elapsed_s")  # columns: when a value was reached

Courses = tuple[dict[str, Any], dict[str, list[Any]]]
# Columns of a course: when the values were reached (elapsed_s is the median of the runs); the median over seeds and
# their range, with one seed the range of its repeats; the interval of the median, from six seeds on.
COURSE = [*PLACES, "middle", "low", "high", "inner_low", "inner_high"]


def learning(
    table: pd.DataFrame, epochs: pd.DataFrame, measurements: Sequence[Measurement], looks: Looks
) -> Iterator[Plot]:
    """The figures of each metric, by epoch and by time. table: of learning.csv"""
    curves = {row["measurement"]: row["learning"] for row in measurements}
    epochs = epochs.loc[epochs["measurement"].isin(list(curves))]  # a figure of a study has a part of the measurements
    epochs = epochs.assign(learning=epochs["measurement"].map(curves.get))
    most: Any = table.groupby("learning")["seeds"].max()
    seeds = {str(name): int(count) for name, count in most.items()}
    for name, metric in METRICS.items():
        for by, place in (("epoch", "epoch"), ("time", "elapsed_s")):
            rows = epochs.dropna(subset=[metric.column, place])
            shown = _panels(measurements, set(rows["measurement"].unique()), seeds)
            yield _plot(f"{name}_by_{by}", metric, shown, courses_of(table, rows, metric.column, place), looks)
        yield _by_batch(f"{name}_by_batch", metric, measurements, looks)
    # The learning rate is the same in all runs of one curve: the first run that has the epoch gives it.
    rows = plain(epochs, ["learning", "status"], [*PLACES, RATE.column]).dropna(subset=[RATE.column])
    ended = rows[rows["status"] == "ok"].sort_values("epoch", kind="stable").drop_duplicates(["learning", "epoch"])
    of_curves = ended.rename(columns={RATE.column: "middle"}).groupby("learning", sort=False)
    rates: dict[str, Any] = {str(key): course.reindex(columns=COURSE) for key, course in of_curves}
    changing = {key for key, course in rates.items() if course["middle"].nunique() > 1}
    shown = _panels(measurements, {name for name, key in curves.items() if key in changing}, seeds)
    yield _plot("learning_rate", RATE, shown, (rates, {}), looks)


def _by_batch(name: str, metric: Metric, measurements: Sequence[Measurement], looks: Looks) -> Plot:
    """The last value of a metric over the samples of an update, in comparable measurements of one model that were
    trained with several batches: the median of those with a batch, such as several seeds. Small dots are the repeats
    (Aach et al. 2023, figure 8b)."""

    def draw(axes: Axes, panel: Panel) -> None:
        values = list[float]()
        one = len({row["compared"] for row in panel.rows}) == 1
        look_of = numbered(panel.curves) if one else {row.curve: looks[row.curve_key] for row in panel.rows}
        # A measurement once, whatever its kinds of scaling.
        rows_of = {curve: {row["measurement"]: row for row in rows}.values() for curve, rows in panel.curves.items()}
        courses = dict[str, dict[int, float]]()
        for curve, rows in rows_of.items():
            by_batch = group_by(rows, lambda row: row["global_batch"])
            courses[curve] = {b: median(row[metric.column] for row in same) for b, same in sorted(by_batch.items())}
        for number, (curve, course) in enumerate(courses.items()):
            look, later = look_of[curve], list(courses.values())[number + 1 :]
            above = sum(all(isclose(course[b], other.get(b, inf), rel_tol=EQUAL) for b in course) for other in later)
            repeats = [(row["global_batch"], run[metric.column]) for row in rows_of[curve] for run in row.runs]
            measured = [point for point in repeats if point[1] is not None]
            axes.plot(*zip(*course.items(), strict=True), color=look.color, **(look.shape | _below(above)))
            axes.plot(*zip(*measured, strict=True), ".", color=look.color, alpha=0.35, markersize=5)
            axes.plot([], [], color=look.color, label=plotting.label(curve), **(look.shape | SMALL))
            values += [*course.values(), *(value for _, value in measured)]
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(plotting.plain))
        axes.set_xlabel("samples of an update")
        _metric_axis(axes, metric, np.array(values))

    reached = [row for row in measurements if row[metric.column] is not None and row["global_batch"]]
    texts, shown = panel_texts(measurements, variant="learning_variant"), list[Panel]()
    for group in group_by(reached, lambda row: (row["model"], row["learning_comparison"])).values():
        if len({row["global_batch"] for row in group}) > 1:
            shown += small_multiples(Panel(*head(group, texts), "", group))
    return Plot(name, shown, draw)


def _below(above: int) -> dict[str, Any]:
    """The size of a curve with equal ones above it. Frameworks that train equally have one curve: those drawn first are
    wider, so that each can be seen."""
    return SMALL | {"linewidth": SMALL["linewidth"] + 2 * above, "markersize": SMALL["markersize"] + 4 * above}


def courses_of(table: pd.DataFrame, epochs: pd.DataFrame, column: str, place: str) -> Courses:
    """The courses of a metric by the column `learning`: those of the runs that ended ok, merged, and one for each other
    run. A course is a data frame with the columns COURSE, NaN where there is no value.

    table:  of learning.csv
    epochs: rows of epochs.csv with a value of the metric, and with the column `learning` of their measurement
    place:  the column of PLACES that must be known
    """
    ends = {"": "middle", "_min": "low", "_max": "high", "_low": "inner_low", "_high": "inner_high"}
    names = {f"{column}{end}": name for end, name in ends.items()}
    rows = table.dropna(subset=[column, place]).sort_values("epoch")
    curves = plain(rows, ["learning"], [*PLACES, "seeds", "runs", *names]).rename(columns=names)
    runs = plain(epochs, ["measurement", "learning", "path", "status"], [*PLACES, column]).rename(columns=names)
    ok = runs["status"] == "ok"
    # A curve of one seed has the range of its repeats.
    one = curves.groupby("learning")["seeds"].transform("max").eq(1) & curves["runs"].gt(1)
    ranges = runs[ok].groupby(["learning", "epoch"])["middle"].agg(["min", "max"])
    curves.loc[one, ["low", "high"]] = curves[one].join(ranges, on=["learning", "epoch"])[["min", "max"]].to_numpy()
    merged = {str(name): curve[COURSE] for name, curve in curves.groupby("learning", sort=False)}
    failed: dict[str, list[Any]] = {}
    for _, run in runs[~ok].groupby(["measurement", "path"]):
        failed.setdefault(str(run["learning"].iloc[0]), []).append(run.reindex(columns=COURSE))
    return merged, failed


def _panels(measurements: Sequence[Measurement], measured: set[str], seeds: Mapping[str, int]) -> list[Panel]:
    """Comparable curves of one model in a panel. seeds: the number of each curve, by its column `learning`"""
    curves = group_by((row for row in measurements if row["measurement"] in measured), lambda row: row["learning"])
    rows = [next((row for row in curve if row["status"] == "ok"), curve[0]) for curve in curves.values()]
    texts = panel_texts(measurements, variant="learning_variant")
    shown: list[Panel] = []
    for group in group_by(rows, lambda row: (row["model"], row["learning_comparison"])).values():
        sizes = {f"{row.devices}, {row['global_batch'] or 'unknown'} samples an update" for row in group}
        title, lines = head(group, texts)
        names = {row: row.curve for row in group}
        if len(sizes) == 1:
            lines += sizes
        else:  # names with the GPU count, and with the batch where that does not follow from it
            batches = {(row["gpus"], row["global_batch"]) for row in group}
            names = {row: f"{row.curve}, {row.devices}" for row in group}
            if len({gpus for gpus, _ in batches}) < len(batches):
                names = {row: f"{name}, batch {row['global_batch'] or 'unknown'}" for row, name in names.items()}
        if len(set(names.values())) < len(names):
            names = {row: f"{name} [{row['layout']}]" if row["layout"] else name for row, name in names.items()}
        counts = sorted({seeds[row["learning"]] for row in group if row["learning"] in seeds})
        if counts and counts[-1] > 1:
            fewest = f"{counts[0]} to " if counts[0] < counts[-1] else ""
            lines.append(f"median and range of {fewest}{counts[-1]} seeds")
        shown += small_multiples(Panel(title, lines, "", group, curve_of=names.__getitem__))
    return shown


def _plot(name: str, metric: Metric, shown: Sequence[Panel], courses: Courses, looks: Looks) -> Plot:
    """A figure over epochs or, by its name, over time: the panels of one model have equal axes, and a curve has one
    look in all of them. looks: of the report, whose colors are kept"""
    merged, failed = courses
    keys = {key for panel in shown for key in panel.curve_keys}
    looks = looks_of(keys, looks)
    own_legends = len(keys) > plotting.SHARED_LABELS or len({compared for compared, _ in keys}) == 1
    values = dict[str, Any]()  # of all curves of a model's panels
    for model, of_model in group_by(shown, lambda panel: panel.model).items():
        names = [row["learning"] for panel in of_model for row in panel.rows]
        ended = [merged[name] for name in names if name in merged]
        values[model] = pd.concat([*ended, *(run for name in names for run in failed.get(name, []))])

    def draw(axes: Axes, panel: Panel) -> None:
        # If the panel has its legend to itself, and one value of the compared factor, its curves differ in color, too.
        alone = own_legends and len({compared for compared, _ in panel.curve_keys}) == 1 < len(panel.curves)
        look_of = numbered(panel.curves) if alone else {key[1]: looks[key] for key in panel.curve_keys}
        places_of = _place_axis(axes, name.endswith("_by_time"), values[panel.model])
        ended = [(row, merged[row["learning"]]) for row in panel.rows if row["learning"] in merged]
        for number, (row, course) in enumerate(ended):
            look, places = look_of[panel.curve_of(row)], places_of(course)
            every = len(places) // MARKERS + 1
            above = sum(
                np.array_equal(places_of(later), places) and np.allclose(later["middle"], course["middle"], rtol=EQUAL)
                for _, later in ended[number + 1 :]
            )
            axes.plot(places, course["middle"], color=look.color, markevery=every, **(look.shape | _below(above)))
            for low, high, alpha in (("low", "high", 0.15), ("inner_low", "inner_high", 0.25)):
                if (course[high] > course[low]).any():
                    axes.fill_between(places, course[low], course[high], color=look.color, alpha=alpha, linewidth=0)
        unended = [(row, run) for row in panel.rows for run in failed.get(row["learning"], [])]
        for row, course in unended[:FAILED_SHOWN]:
            color, places = look_of[panel.curve_of(row)].color, places_of(course)
            axes.plot(places, course["middle"], color=color, linewidth=0.8, alpha=0.7)
            axes.plot(places.iloc[-1], course["middle"].iloc[-1], "x", color=color, markersize=8, markeredgewidth=1.8)
        for text, look in look_of.items():
            axes.plot([], [], color=look.color, label=plotting.label(text), **(look.shape | SMALL))
        if (others := len(unended) - FAILED_SHOWN) > 0:
            axes.plot([], [], "x", color="#555555", label=f"{others} more that did not end ok are not drawn")
        _metric_axis(axes, metric, values[panel.model][["low", "middle", "high"]].to_numpy())

    return Plot(name, shown, draw)


def _place_axis(axes: Axes, by_time: bool, values: Any) -> Callable[[Any], Any]:
    """Draw the axis of epochs, counted from 1, or of time, with room for all values. Returns a function that gives the
    places of a course."""
    if not by_time:
        axes.set_xlabel("epochs of training")
        _limit(axes.set_xlim, values["epoch"].min() + 1, values["epoch"].max() + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return lambda course: course["epoch"] + 1
    longest_s = values["elapsed_s"].max()
    unit, seconds = next(((unit, size) for unit, size in UNITS if longest_s >= 3 * size), ("s", 1.0))
    axes.set_xlabel(f"time since the first step, validation included ({unit})")
    _limit(axes.set_xlim, 0.0, longest_s / seconds)
    return lambda course: course["elapsed_s"] / seconds


def _metric_axis(axes: Axes, metric: Metric, values: np.ndarray[Any, Any]) -> None:
    label, finite = metric.label, values[np.isfinite(values)]
    if len(finite):
        low, high = finite.min(), finite.max()
        if not metric.share and high > SQUASHED * low > 0:
            axes.set_yscale("log")
            label = f"{label} (log scale)"
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_ylim(low / 1.1, high * 1.1)
        else:
            _limit(axes.set_ylim, low, high)
    plotting.value_name(axes, label)
    axes.yaxis.set_major_formatter(FuncFormatter(plotting.percent if metric.share else plotting.plain))


def _limit(set_limits: Callable[[float, float], Any], low: float, high: float) -> None:
    """The axis holds both ends, with a margin."""
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    set_limits(low - margin, high + margin)
