"""The parts of a study: its axes and keys, settings, figures. Each is checked as it is read from plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddlbench.config.overrides import check_words
from ddlbench.config.values import check_value, shown
from ddlbench.errors import UserError
from ddlbench.sweep.values import KEY, Plain, as_list, names_of, number, section, word

Where = Sequence[Mapping[str, list[Any]]]  # cells: those whose values on the axes are all among those of one entry

MOST_GPUS = 2**20
SCALING = {"strong": "train.global_batch", "weak": "train.batch_per_gpu"}
NAME = re.compile(r"\w[\w. -]*")  # of a file or figure: it becomes that of a folder, and of jobs
# Folders depend on the machine: they belong to the command line, not to a study's file.
PATHS = (
    "results_dir", "checkpoint.dir", "data.root", "data.cache_dir", "data.stage_to", "data.tokenizer", "data.train",
    "data.valid", "data.train_dir", "data.val_dir", "framework.nvme_path",
)  # fmt: skip
# Set by the sweep in each cell, and how to ask it for them.
OF_SWEEP = {
    "train.repeat": "repeats=N",
    "train.seed": "seeds=[A,B]",
    "train.global_batch": "scaling=strong batch=N",
    "train.batch_per_gpu": "scaling=weak batch=N",
    "dryrun": "--dry-run",
    "backend": "python -m ddlbench, for single runs",
}


class Figure(NamedTuple):
    """A figure of a paper: ddlbench-report RESULTS --study NAME draws it from the cells of the study.

    kind:  a figure of the report, such as epoch_time (figures/figures.py)
    where: its cells; [{}]: all
    best:  whether each curve has its fastest GPU count alone
    by:    as Study.by, which holds where this is empty
    """

    kind: str
    where: Where
    best: bool = False
    by: tuple[str, ...] = ()


class Setting(NamedTuple):
    """Keys of the cells that `where` names."""

    where: Where
    keys: Plain


def check_axis(key: Any, values: list[Any]) -> None:
    """UserError for an axis without values, with a value twice, or with one that its key cannot have."""
    if not values:
        raise UserError(f"axis {shown(key)} has no values: give at least one")
    for value in values:
        check_key(key, value)
    texts = [str(value) for value in values]
    if len(set(texts)) < len(texts):
        raise UserError(f"axis {shown(key)} names a value twice: use repeats for several runs of one cell")


def check_key(key: Any, value: Any, of_file: bool = True) -> None:
    """UserError for a key or value that no axis and no key of a study may have. of_file: in a study's file; else on the
    command line."""
    if key == "scaling":
        if value not in tuple(SCALING):  # it may be a list
            raise UserError(f"scaling={shown(value)} is unknown: choose strong (batch: of all GPUs) or weak (of each)")
    elif key in ("gpus", "batch"):
        if number(key, value, 1) > MOST_GPUS:
            raise UserError(f"{key}={shown(value)} is too large: give at most {MOST_GPUS}")
    elif not isinstance(key, str) or not KEY.fullmatch(key):
        raise UserError(f"{shown(key)} is no key of ddlbench: write dotted names, such as train.epochs")
    elif key in OF_SWEEP:
        raise UserError(f"{key} cannot be set in a study: use {OF_SWEEP[key]}")
    elif of_file and key in PATHS:
        raise UserError(f"{key} cannot be set in a study's file: paths belong to the command line, {key}=PATH")
    else:
        check_value(key, value)
        check_words([word(key, value)])


def settable(raw: Any, place: str) -> dict[str, Any]:
    """A section of keys that a study may set."""
    keys = section(raw, place)
    for key, value in keys.items():
        check_key(key, value)
    return keys


def setting_of(raw: Any, axes: Plain) -> Setting:
    """One entry of `settings`. axes: of the study"""
    content = section(raw, "settings")
    if set(content) != {"where", "keys"}:
        raise UserError("each of settings has `where` (values on axes) and `keys`")
    keys = settable(content["keys"], "settings")
    if "gpus" in keys:
        raise UserError("settings cannot set gpus: make it an axis")
    return Setting(where_of(content["where"], axes, "settings"), keys)


def figure_of(name: Any, raw: Any, axes: Plain) -> Figure:
    """One entry of `figures`. axes: of the study"""
    content, place = section(raw, "figures"), f"figures: {shown(name)}"
    best = content.get("best", False)
    wrong = not NAME.fullmatch(str(name)) or not set(content) <= set(Figure._fields) or "kind" not in content
    if wrong or not isinstance(best, bool):
        raise UserError(
            f"{place}: a figure has a name of letters and digits, a kind, and may have where, by, best: true | false"
        )
    where = where_of(content["where"], axes, place) if "where" in content else [{}]
    return Figure(str(content["kind"]), where, best, names_of("by", content.get("by", [])))


def where_of(raw: Any, axes: Plain, place: str) -> Where:
    """The cells that one entry or a list of entries names; arguments as entry_of takes them."""
    return [entry_of(entry, axes, place) for entry in as_list(raw) or [raw]]


def entry_of(raw: Any, axes: Plain, place: str) -> dict[str, list[Any]]:
    """The values on axes that name some cells. axes: of the study; place: the name of the section in a message"""
    where = section(raw, place)
    if not where or [] in where.values():
        raise UserError(f"{place}: {shown(raw)} names no cells: give axes and values of this study, or leave it out")
    for key, value in where.items():
        unknown = [item for item in as_list(value) if key not in axes or item not in axes[key]]
        if key not in axes or unknown:
            raise UserError(f"{place}: {shown(key)}={shown(value)} is on no axis: give axes and values of this study")
    return {key: as_list(value) for key, value in where.items()}


def matches(where: Where, point: Plain) -> bool:
    """Whether a point has, for one entry, one of the given values on each axis."""
    return any(all(key in point and point[key] in values for key, values in entry.items()) for entry in where)


def seeds_of(value: Any) -> list[int]:
    """One seed, or a list of seeds."""
    if value == []:
        raise UserError("seeds=[] has no values: give at least one")
    return [number("seeds", seed, 0) for seed in as_list(value)]
