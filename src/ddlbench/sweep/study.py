"""A study: axes, what is excluded, repeats. docs/studies.md explains the keys of its YAML file."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from ddlbench.config.choices import choices, conf_dir, is_key_of
from ddlbench.config.values import check, shown
from ddlbench.errors import UserError
from ddlbench.sweep.values import Plain, as_list, check_key, names_of, number, parse_word, quoted, read, section, word

FOLDERS = ("study", "experiment")  # of conf/
LARGEST = 100_000  # cells
MOST_GPUS = 2**20
SCALING = {"strong": "train.global_batch", "weak": "train.batch_per_gpu"}
NAME = re.compile(r"\w[\w. -]*")  # of a file: it becomes that of a folder, and of jobs
SPECIAL = ("gpus", "batch", "scaling")  # of axes, beside the keys of ddlbench
NUMBERS = {"repeats": 1, "order": 0, "gpus_per_node": 1, "limit_s": 1}  # the smallest value of each


class Figure(NamedTuple):
    """A figure of a paper: ddlbench-report RESULTS --study NAME draws it from the cells of the study.

    kind:  a figure of the report, such as epoch_time (figures/figures.py)
    where: the values on the axes of its cells; empty: all
    best:  whether each curve has its fastest GPU count alone
    by:    as Study.by, which holds where this is empty
    """

    kind: str
    where: Mapping[str, list[Any]]
    best: bool = False
    by: tuple[str, ...] = ()


class Setting(NamedTuple):
    """Keys of those cells whose values on the axes are all among those of `where`."""

    where: Mapping[str, list[Any]]
    keys: Plain


@dataclass(frozen=True)
class Study:
    """Every combination of the axes' values that no line of `exclude` names, `repeats` times for each seed.

    order: seed of the random order of the cells
    limit_s: seconds after which a cell is ended; limits_s: limits for single GPU counts
    overrides: keys of the command line, which take precedence over all others
    by, across: what the rows of its report are compared by, as --by and --across of ddlbench-report
    figures: of the paper, by their numbers in it
    """

    name: str
    axes: Mapping[str, list[Any]]
    keys: Plain = field(default_factory=dict[str, Any])
    settings: Sequence[Setting] = ()
    exclude: Sequence[Mapping[str, list[Any]]] = ()
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
        points = dict[str, Plain]()
        for values in itertools.product(*self.axes.values()):
            point = dict(zip(self.axes, values, strict=True))
            if not any(matches(where, point) for where in self.exclude):
                keys = self._keys(point)
                point = {key: value for key, value in point.items() if is_key_of(keys.get(key.partition(".")[0]), key)}
                points.setdefault(str(point), point)
        return iter(points.values())

    def _keys(self, point: Plain) -> dict[str, Any]:
        keys: dict[str, Any] = {"preflight": True, **self.keys}
        for setting in self.settings:
            if matches(setting.where, point):
                keys |= setting.keys
        return {**keys, **point, **self.overrides}

    def words(self, point: Plain) -> tuple[str, ...]:
        """ddlbench's command line, without seed and repeat. GPU count and batch rule are taken out of the keys."""
        keys = self._keys(point)
        scaling, batch = keys.pop("scaling", "strong"), keys.pop("batch", None)
        keys.pop("gpus", None)
        if batch is not None:
            keys[SCALING[scaling]] = batch
        return tuple(word(key, value) for key, value in keys.items())

    def limit(self, gpus: int) -> float:
        return self.limits_s.get(gpus, self.limit_s)


def names() -> dict[str, str]:
    """Every ready study and experiment with its title, the first line of its file."""
    files = [conf_dir() / folder / f"{name}.yaml" for folder in FOLDERS for name in choices(folder)]
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in files}


def load(name: str, words: Sequence[str] = ()) -> Study:
    """The study of a name, or of a YAML file, with the command line's words. UserError for any mistake in them."""
    study = of_file = _of_file(_find(name))
    for override in words:
        study = _override(study, *parse_word(override))
    study = replace(study, results_dir=study.results_dir or f"results/{study.name}")
    return _checked(study, of_file)


def _find(name: str) -> Path:
    files = [conf_dir() / folder / f"{name}.yaml" for folder in FOLDERS if re.fullmatch(r"\w[\w-]*", name)]
    path = Path(name) if name.endswith((".yaml", ".yml")) else next(filter(Path.is_file, files), None)
    if path is None:
        studies = ", ".join(names())
        raise UserError(f"{shown(name)} is no study: choose one of {studies}, or give the path of a YAML file")
    return path


def _of_file(path: Path) -> Study:
    raw = read(path)
    if not NAME.fullmatch(path.stem):
        raise UserError(f"{shown(path)}: a study's name becomes that of a folder: use letters, digits, _, - and .")
    try:
        return _study(path.stem, raw)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _study(name: str, raw: dict[str, Any]) -> Study:
    keys = {field.name for field in fields(Study)} - {"name", "results_dir", "overrides"} | {"base"}
    for key in raw:
        if key not in keys:
            raise UserError(f"{shown(key)} is no key of a study: the keys are {', '.join(sorted(keys))}")
    raw = {key: value for key, value in raw.items() if value is not None}  # a key without content
    base = _base(raw["base"]) if "base" in raw else Study(name, axes={})
    new_axes = {key: as_list(value) for key, value in section(raw.get("axes"), "axes").items()}
    for key, values in new_axes.items():
        _check_axis(key, values)
    axes = {**base.axes, **new_axes}
    figures = {str(key): content for key, content in section(raw.get("figures"), "figures").items()}
    limits = section(raw.get("limits_s"), "limits_s")
    return replace(
        base,
        name=name,
        axes=axes,
        keys={**base.keys, **_settable(raw.get("keys"), "keys")},
        settings=[*base.settings, *(_setting(item, axes) for item in as_list(raw.get("settings", [])))],
        exclude=[*base.exclude, *(_where(item, axes, "exclude") for item in as_list(raw.get("exclude", [])))],
        seeds=_seeds(raw["seeds"]) if "seeds" in raw else base.seeds,
        by=names_of("by", raw["by"]) if "by" in raw else base.by,
        across=names_of("across", raw["across"]) if "across" in raw else base.across,
        figures={
            **{key: figure for key, figure in base.figures.items() if key not in figures},
            **{key: _figure(key, content, axes) for key, content in figures.items() if content is not None},
        },
        limits_s={number("limits_s", gpus, 1): number("limits_s", limit, 1) for gpus, limit in limits.items()},
        **cast(Any, {key: number(key, raw[key], least) for key, least in NUMBERS.items() if key in raw}),
    )


def _base(name: Any) -> Study:
    """The ready study that another one changes."""
    if not isinstance(name, str) or name not in names():
        raise UserError(f"base={shown(name)} is no ready study: choose one of {', '.join(names())}")
    return _of_file(_find(name))


def _override(study: Study, key: str, value: Any) -> Study:
    """The study with one word of the command line."""
    if key in NUMBERS:
        return replace(study, **{key: number(key, value, NUMBERS[key])})
    if key == "seeds":
        return replace(study, seeds=_seeds(value))
    if key == "results_dir":
        check(key, value)
        return replace(study, results_dir=value)
    if key in study.axes:
        _check_axis(key, as_list(value))
        return replace(study, axes={**study.axes, key: as_list(value)})
    _check_value(key, value, of_file=False)
    return replace(study, overrides={**study.overrides, key: value})


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
    points = list(study.points())
    if not points:
        raise UserError(f"{study.name}: exclude leaves no cell: leave out fewer values, or give others on its axes")
    unused = [key for key in study.axes if not any(key in point for point in points)]
    for key in unused:
        if study.axes[key] != of_file.axes[key] or not any(key in point for point in of_file.points()):
            raise UserError(f"{study.name}: axis {key}: no {key.partition('.')[0]} of this study has this key")
    study = replace(study, axes={key: values for key, values in study.axes.items() if key not in unused})
    quoted("results_dir", study.results_dir)
    return study


def _check_axis(key: Any, values: list[Any]) -> None:
    if not values:
        raise UserError(f"axis {shown(key)} has no values: give at least one")
    for value in values:
        _check_value(key, value)
    texts = [str(value) for value in values]
    if len(set(texts)) < len(texts):
        raise UserError(f"axis {shown(key)} names a value twice: use repeats for several runs of one cell")


def _check_value(key: Any, value: Any, of_file: bool = True) -> None:
    """UserError for what no axis and no key of a study may be; of_file: as check_key takes it."""
    if key not in SPECIAL:
        check_key(key, value, of_file)
    elif key == "scaling":
        if value not in SCALING:
            raise UserError(f"scaling={shown(value)} is unknown: choose strong (batch: of all GPUs) or weak (of each)")
    elif number(key, value, 1) > MOST_GPUS:
        raise UserError(f"{key}={shown(value)} is too large: give at most {MOST_GPUS}")


def _settable(raw: Any, place: str) -> dict[str, Any]:
    keys = section(raw, place)
    for key, value in keys.items():
        _check_value(key, value)
    return keys


def _setting(raw: Any, axes: Plain) -> Setting:
    content = section(raw, "settings")
    if set(content) != {"where", "keys"}:
        raise UserError("each of settings has `where` (values on axes) and `keys`")
    keys = _settable(content["keys"], "settings")
    if "gpus" in keys:
        raise UserError("settings cannot set gpus: make it an axis")
    return Setting(_where(content["where"], axes, "settings"), keys)


def _figure(name: Any, raw: Any, axes: Plain) -> Figure:
    content, place = section(raw, "figures"), f"figures: {shown(name)}"
    best = content.get("best", False)
    wrong = not NAME.fullmatch(str(name)) or not set(content) <= set(Figure._fields) or "kind" not in content
    if wrong or not isinstance(best, bool):
        raise UserError(
            f"{place}: a figure has a name of letters and digits, a kind, and may have where, by, best: true | false"
        )
    where = _where(content["where"], axes, place) if "where" in content else {}
    return Figure(str(content["kind"]), where, best, names_of("by", content.get("by", [])))


def _where(raw: Any, axes: Plain, place: str) -> dict[str, list[Any]]:
    where = section(raw, place)
    if not where or [] in where.values():
        raise UserError(f"{place}: {shown(raw)} names no cells: give axes and values of this study, or leave it out")
    for key, value in where.items():
        unknown = [item for item in as_list(value) if key not in axes or item not in axes[key]]
        if key not in axes or unknown:
            raise UserError(f"{place}: {shown(key)}={shown(value)} is on no axis: give axes and values of this study")
    return {key: as_list(value) for key, value in where.items()}


def matches(where: Mapping[str, list[Any]], point: Plain) -> bool:
    """Whether a point has one of the given values on each axis."""
    return all(key in point and point[key] in values for key, values in where.items())


def _seeds(value: Any) -> list[int]:
    if value == []:
        raise UserError("seeds=[] has no values: give at least one")
    return [number("seeds", seed, 0) for seed in as_list(value)]
