"""A study, its cells, and how it is read from a YAML file and the command line. docs/studies.md explains its keys."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ddlbench.config.choices import choices, conf_dir, defaults, holds_list, published
from ddlbench.config.keys import check_value, shown
from ddlbench.errors import UserError
from ddlbench.sweep import study_entries as entries
from ddlbench.sweep.study_entries import Figure, Plain, Where, as_list, matches, number

OF_SOME = ("framework", "loader")  # groups in which some options have keys that others lack
FOLDERS = ("study", "experiment")  # of conf/
LARGEST = 100_000  # cells
NUMBERS = {"repeats": 1, "order": 0, "gpus_per_node": 1, "limit_s": 1}  # the smallest value of each


@dataclass(frozen=True)
class Study:
    """Every combination of the axes' values that `exclude` does not name, `repeats` times for each seed.

    settings: cells and the keys that they have
    order: seed of the random order of the cells
    limit_s: seconds after which a cell is ended; limits_s: limits for single GPU counts
    overrides: keys of the command line, which take precedence over all others
    by, across: what the rows of its report are compared by, as --by and --across of ddlbench-report
    figures: of the paper, by their numbers in it
    """

    name: str
    axes: Mapping[str, list[Any]]
    keys: Plain = field(default_factory=dict[str, Any])
    settings: Sequence[tuple[Where, Plain]] = ()
    exclude: Where = ()
    repeats: int = 1
    seeds: Sequence[int] = (0,)
    order: int = 0
    gpus_per_node: int = 4
    limit_s: float = 3600
    limits_s: Mapping[int, float] = field(default_factory=dict[int, float])
    results_dir: str = ""
    overrides: Plain = field(default_factory=dict[str, Any])
    by: tuple[str, ...] = ("framework",)
    across: tuple[str, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])

    def points(self) -> Iterator[Plain]:
        """The values on the axes of every combination that is not excluded, once. A key that the point's framework,
        loader, ... lacks has no value there."""
        seen = set[str]()
        for combination in self._combinations():
            keys = self.keys_of(combination)
            point = {key: value for key, value in combination.items() if key in keys}
            if str(point) not in seen:
                seen.add(str(point))
                yield point

    def unused(self) -> set[str]:
        """The keys that only combinations of options without them would have."""
        given, used = set[str](), set[str]()
        for combination in self._combinations():
            given |= self._given(combination).keys()
            used |= self.keys_of(combination).keys()
        return given - used

    def _combinations(self) -> Iterator[Plain]:
        for values in itertools.product(*self.axes.values()):
            combination = dict(zip(self.axes, values, strict=True))
            if not matches(self.exclude, combination):
                yield combination

    def _given(self, point: Plain) -> dict[str, Any]:
        """The keys that the study gives a point, also those that the point's framework or loader lacks."""
        keys: dict[str, Any] = {"preflight": True, **self.keys}
        for where, more in self.settings:
            if matches(where, point):
                keys |= more
        return {**keys, **self.overrides, **point}

    def keys_of(self, point: Plain) -> dict[str, Any]:
        """The keys of a point that its framework and loader have: ddp has no framework.tp."""
        keys = self._given(point)
        options = {**defaults(), **keys}
        for key in list(keys):
            group, *path = key.split(".")
            option = options.get(group)
            if group in OF_SOME and path and option in choices(group) and path[0] not in published(group, option):
                del keys[key]
        return keys

    def words(self, point: Plain) -> tuple[str, ...]:
        """ddlbench's command line, without seed and repeat. GPU count and batch rule are taken out of the keys."""
        keys = self.keys_of(point)
        scaling, batch = keys.pop("scaling", "strong"), keys.pop("batch", None)
        keys.pop("gpus", None)
        if batch is not None:
            keys[entries.SCALING[scaling]] = batch
        return tuple(entries.word(key, value) for key, value in keys.items())


def names() -> dict[str, str]:
    """Every ready study and experiment with its title, the first line of its file."""
    files = [conf_dir() / folder / f"{name}.yaml" for folder in FOLDERS for name in choices(folder)]
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in files}


def load(name: str, words: Sequence[str] = ()) -> Study:
    """The study of a name, or of a YAML file, with the command line's words. UserError for any mistake in them."""
    study = of_file = _of_file(name)
    for key, value in map(entries.parse_word, words):
        if key in (*NUMBERS, "seeds"):
            study = replace(study, **_numbers({key: value}))
            if key == "limit_s":
                study = replace(study, limits_s={})  # of the file
        elif key == "results_dir":
            check_value(key, value)
            study = replace(study, results_dir=value)
        elif key in study.axes or (isinstance(value, list) and not holds_list(key)):
            entries.check_axis(key, as_list(value))
            study = replace(study, axes={**study.axes, key: as_list(value)})
        else:
            entries.check_key(key, value, of_file=False)
            study = replace(study, overrides={**study.overrides, key: value})
    study = replace(study, results_dir=study.results_dir or f"results/{study.name}")
    return _checked(study, of_file)


def _of_file(name: str) -> Study:
    """A ready study or experiment, or that of a YAML file."""
    files = [conf_dir() / folder / f"{name}.yaml" for folder in FOLDERS if re.fullmatch(r"\w[\w-]*", name)]
    path = Path(name) if name.endswith((".yaml", ".yml")) else next(filter(Path.is_file, files), None)
    if path is None:
        studies = ", ".join(names())
        raise UserError(f"{shown(name)} is no study: choose one of {studies}, or give the path of a YAML file")
    raw = entries.read(path)
    if not entries.NAME.fullmatch(path.stem):
        raise UserError(f"{shown(path)}: a study's name becomes that of a folder: use letters, digits, _, - and .")
    try:
        return _study(path.stem, raw)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _study(name: str, raw: dict[str, Any]) -> Study:
    """The study of a file's content, with what it takes over from the ready study that `base` names."""
    keys = {field.name for field in fields(Study)} - {"name", "results_dir", "overrides"} | {"base"}
    for key in raw:
        if key not in keys:
            raise UserError(f"{shown(key)} is no key of a study: the keys are {', '.join(sorted(keys))}")
    raw = {key: value for key, value in raw.items() if value is not None}  # a key without content
    base = Study(name, axes={})
    if (of := raw.get("base")) is not None:
        if not isinstance(of, str) or of not in names():
            raise UserError(f"base={shown(of)} is no ready study: choose one of {', '.join(names())}")
        base = _of_file(of)
    new_axes = {key: as_list(value) for key, value in entries.section(raw.get("axes"), "axes").items()}
    for key, values in new_axes.items():
        entries.check_axis(key, values)
    axes = {**base.axes, **new_axes}
    figures = {str(key): content for key, content in entries.section(raw.get("figures"), "figures").items()}
    limits = entries.section(raw.get("limits_s"), "limits_s").items()
    limits_s = {number("limits_s", gpus, 1): number("limits_s", limit, 1) for gpus, limit in limits}
    exclude = raw.get("exclude", [])
    return replace(
        base,
        name=name,
        axes=axes,
        keys={**base.keys, **entries.settable(raw.get("keys"), axes, "keys")},
        settings=[*base.settings, *(entries.setting_of(item, axes) for item in as_list(raw.get("settings", [])))],
        exclude=[*base.exclude, *(entries.where_of(exclude, axes, "exclude") if exclude != [] else [])],
        by=entries.names_of("by", raw["by"]) if "by" in raw else base.by,
        across=entries.names_of("across", raw["across"]) if "across" in raw else base.across,
        figures={
            **{key: figure for key, figure in base.figures.items() if key not in figures},
            **{key: entries.figure_of(key, content, axes) for key, content in figures.items() if content is not None},
        },
        limits_s={**base.limits_s, **limits_s},
        **_numbers(raw),
    )


def _numbers(raw: Plain) -> dict[str, Any]:
    """The whole numbers of a study among keys of its file or of the command line: one or several seeds, and NUMBERS."""
    numbers: dict[str, Any] = {key: number(key, raw[key], least) for key, least in NUMBERS.items() if key in raw}
    if "seeds" in raw:
        numbers["seeds"] = [number("seeds", seed, 0) for seed in as_list(raw["seeds"])]
        entries.check_distinct("seeds", numbers["seeds"])
    return numbers


def _checked(study: Study, of_file: Study) -> Study:
    """The study without the axes of cells that the command line left out. of_file: before the words of the command
    line"""
    for key in ("framework", "model"):
        if not any(key in keys for keys in (study.axes, study.keys, study.overrides)):
            raise UserError(f"{study.name}: no {key}: give it as an axis or a key")
    if "gpus" not in study.axes:
        gpus = study.overrides.get("gpus", study.keys.get("gpus", 1))
        study = replace(study, axes={**study.axes, "gpus": [gpus]})
    cells = math.prod(len(values) for values in study.axes.values()) * study.repeats * len(study.seeds)
    if cells > LARGEST:
        raise UserError(f"{study.name} has {cells:,} cells: give fewer values or repeats, at most {LARGEST:,} cells")
    if not any(study.points()):
        raise UserError(f"{study.name}: exclude leaves no cell: leave out fewer values, or give others on its axes")
    unused = study.unused()
    unused_in_file = of_file.unused() if unused else unused
    for key in sorted(unused):
        of_words = key in study.overrides or study.axes.get(key) != of_file.axes.get(key)
        if of_words or key in unused_in_file:
            axis, group = "axis " * (key in study.axes), key.partition(".")[0]
            raise UserError(f"{study.name}: {axis}{key}: no {group} of this study has this key: leave it out")
    study = replace(study, axes={key: values for key, values in study.axes.items() if key not in unused})
    entries.quoted("results_dir", study.results_dir)
    return study
