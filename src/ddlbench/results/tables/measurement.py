"""Measurements as figures and texts show them: the rows of scaling.csv with their repeats and names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddlbench.results.rows import OWN, PUBLISHED, Row, Settings, group_by, without_data_wait
from ddlbench.results.tables.labels import settings_text, value_text
from ddlbench.results.tables.merge import ANY_SCALING, BY_FRAMEWORK, Comparison, RankPasses, size
from ddlbench.results.tables.stats import LEVEL, Interval
from ddlbench.texts import counted

# Columns of scaling.csv that an overview shows only where they distinguish rows.
AXES = {
    "batch": "global_batch", "precision": "precision", "data": "data", "recipe": "recipe", "device": "device",
    "nodes": "nodes", "cluster": "cluster",
}  # fmt: skip
SETTINGS = ("layout", "knobs", "across", "variant")  # columns of texts
# Settings of --across that are shown without their key, because the values say what they are.
WITHOUT_KEY = ("data", "recipe", "precision", "device", "torch", "scaling", "batch")


@dataclass(frozen=True)
class Base:
    """The base of a ratio: seconds a sample on a number of GPUs.

    name: its value of the compared factor: "ddp", with --by loader "dali"
    """

    seconds: float
    gpus: int
    name: str = field(default="", compare=False)
    epoch_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class Measurement:
    """A row of scaling.csv. Its columns are those of record/columns.toml: measurement["sample_time_s"].

    row:        its columns
    how:        what it is compared by
    settings:   the settings behind columns of texts, by column: "knobs", "across", "layout", "model_changed"
    mark_names: the names of the reasons to doubt it
    options:    its configuration, as dotted keys, also those added later
    passes:     for each rank of a profiled pipeline, by its stage; those of the first repeat that has them
    runs:       the rows of runs.csv of its attempts that ended ok

    These follow from a comparison with the other measurements of a report:
    model:        "resnet50*" for other sizes than the published ones, numbered if there are several: "resnet50*2".
                  A published measurement says so, because all texts name the model: "ResNet-50 (published)"
    marks_number: "!1"; equal for equal marks
    axes:         batch=512: the columns of AXES in which it differs from rows of the same names, GPU count and
                  settings, and the cluster where comparable rows have several

    With --across, rows of one panel may differ in more than the compared factors: `judged_with` is equal for rows
    on equally many GPUs between which a verdict is given.
    """

    row: Row
    how: Comparison = BY_FRAMEWORK
    settings: Mapping[str, Settings] = field(default_factory=lambda: defaultdict(dict))
    mark_names: Collection[str] = ()
    options: Row = field(default_factory=dict[str, Any])
    passes: Mapping[int, RankPasses] = field(default_factory=dict[int, RankPasses])
    runs: Sequence[Row] = ()
    model: str | None = None
    marks_number: str = ""
    axes: Settings = field(default_factory=dict[str, str])

    def __getitem__(self, column: str) -> Any:
        return self.row[column]

    @property
    def curve(self) -> str:
        """The name of its curve: the values of the compared factors, its knobs, the settings in which rows of its panel
        differ, and its cluster if comparable measurements have several."""
        name = named(self["compared"], self.settings["knobs"], self.settings["across"])
        return f"{name} at {self.axes['cluster']}" if "cluster" in self.axes else name

    @property
    def curve_key(self) -> tuple[str, str]:
        """The value of the compared factor, which has one color in all figures, and the name of the curve."""
        return str(self["compared"]), self.curve

    @property
    def series(self) -> tuple[Any, ...]:
        """Equal for measurements of one panel. They share a kind of scaling, unless --across takes all kinds."""
        return (self["comparison"],) if self.any_scaling else (self["comparison"], self["scaling"], size(self.row))

    def busy_step_s(self, sample_time_s: float) -> float:
        """Seconds of a step without waiting for data, which is what the oracle predicts. sample_time_s: of one run"""
        return without_data_wait(sample_time_s * self["global_batch"], self.row)

    @property
    def any_scaling(self) -> bool:
        return ANY_SCALING in self.how.across

    @property
    def is_reference(self) -> bool:
        """Whether it leaves out a part of the training: then it is no result."""
        return any(run["reference"] for run in self.runs)

    @property
    def judged_with(self) -> tuple[Any, ...]:
        return tuple(self[name] for name in ("verdict_group", "global_batch", "nodes", "cluster"))

    @property
    def name(self) -> str:
        """The name of its curve, and the layout of its ranks if the configuration sets it."""
        return self.curve + (f" [{self['layout']}]" if self["layout"] else "")

    @property
    def other_settings(self) -> str:
        """The other settings that distinguish it from others in a table."""
        return " ".join(filter(None, (settings_text(self.axes), *(self[name] for name in SETTINGS))))

    @property
    def devices(self) -> str:
        return devices(self["gpus"] or 0, self["device"])

    @property
    def place(self) -> str:
        """ "8 GPUs", "8 GPUs of 2 nodes"."""
        return self.devices + (f" of {self['nodes']} nodes" if (self["nodes"] or 1) > 1 else "")

    @property
    def interval(self) -> Interval | None:
        """The interval of the median time of a sample; None with too few repeats."""
        low, high = self["sample_time_low_s"], self["sample_time_high_s"]
        return None if low is None or high is None else Interval(low, high, LEVEL)

    @property
    def scaling(self) -> str:
        """ "weak scaling, 32 samples a GPU"."""
        device = devices(1, self["device"]).split()[1]
        kind = {"weak": "weak scaling", "strong": "strong scaling", "single": f"one {device} count"}[self["scaling"]]
        per, batch = f"a {device}" if self["scaling"] == "weak" else "an update", size(self.row)
        return f"{kind}, {batch:g} samples {per}" if batch is not None else kind

    def has_ratios(self, own: bool) -> bool:
        """Whether it has ratios to its own base, or to the best single GPU. The ratios of the base itself, which are 1
        by definition, do not count."""
        suffix = "_vs_own_base" if own else ""
        return not {self[f"speedup{suffix}"], self[f"efficiency{suffix}"]} <= {None, 1.0}

    def base(self, own: bool) -> Base | None:
        """The base of its curve, or the best single GPU; None without such a measurement."""
        kind, name = ("own_base", "compared") if own else ("best_single", "best_single_compared")
        seconds, gpus = self[f"{kind}_sample_time_s"], self["own_base_gpus"] if own else 1
        text = named(self[name], {}, self.settings["across" if own else "best_single_across"])
        return Base(seconds, gpus, text, self[f"{kind}_epoch_time_s"]) if seconds else None


def named(compared: str | None, knobs: Settings, across: Settings) -> str:
    """ "ddp (bucket_cap_mb=1 fp16 adamw weak 32)". Settings of WITHOUT_KEY are shown without their key."""
    texts = [value if key in WITHOUT_KEY else f"{key}={value}" for key, value in across.items()]
    settings = " ".join(filter(None, (settings_text(knobs), *texts)))
    return f"{compared} ({settings})" if settings else str(compared)


def compared_with_others(scaling: Sequence[Measurement], runs: Sequence[Row]) -> list[Measurement]:
    """The measurements of a report, with what distinguishes them from each other. runs: of runs.csv"""
    marks = dict.fromkeys(row["marks"] for row in scaling if row["marks"])
    numbers = {text: f"!{number}" for number, text in enumerate(marks, 1)}
    names = model_names(runs)
    axes: dict[Measurement, Settings] = {}
    tables = group_by((row for row in scaling if row["origin"] == OWN), lambda row: row["learning_comparison"])
    on_several = {table for table, rows in tables.items() if len({row["cluster"] for row in rows} - {None}) > 1}
    alike = ("framework", "model", "model_changed", "loader", "mode", "gpus", *SETTINGS)
    for group in group_by(scaling, lambda row: tuple(row[name] for name in alike)).values():
        differing = [axis for axis, column in AXES.items() if len({row[column] for row in group} - {None}) > 1]
        for row in group:
            shown = {*differing, "cluster"} if row["learning_comparison"] in on_several else differing
            values = {axis: row[column] for axis, column in AXES.items() if axis in shown}
            axes[row] = {axis: value_text(value) for axis, value in values.items() if value is not None}
    measurements: list[Measurement] = []
    for row in scaling:
        model = names.get((row["model"], row["model_changed"]), row["model"])
        if row["origin"] == PUBLISHED:
            model = f"{model} ({PUBLISHED})"
        measurements.append(replace(row, model=model, marks_number=numbers.get(row["marks"], ""), axes=axes[row]))
    return measurements


def model_names(runs: Iterable[Row]) -> dict[tuple[str | None, str | None], str]:
    """Names of models of other sizes than published, by model and changed sizes."""
    changed = {(row["model"], row["model_changed"]) for row in runs if row["model_changed"]}
    by_model = group_by(sorted(changed, key=lambda sizes: (str(sizes[0]), sizes[1])), lambda sizes: sizes[0])
    numbered = [pair for same in by_model.values() for pair in enumerate(same, 1)]
    return {sizes: f"{sizes[0]}*{number if number > 1 else ''}" for number, sizes in numbered}


def devices(count: int, device: str | None) -> str:
    """ "1 GPU", "4 GPUs", "2 ranks". count: 0: not known"""
    if not count:
        return f"an unknown number of {'ranks' if device == 'cpu' else 'GPUs'}"
    return counted(count, "rank" if device == "cpu" else "GPU")


def duration(seconds: float) -> str:
    """Seconds with three significant digits in a fitting unit; 1,000 s and more as full seconds."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    units = ("s", 1.0), ("ms", 1e-3)
    unit, size = next(((unit, size) for unit, size in units if seconds >= 0.9995 * size), ("µs", 1e-6))
    return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
