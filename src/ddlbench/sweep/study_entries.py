"""The entries of a study, which are checked as they are read: axes and keys, settings, figures; and values as words of
ddlbench's command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddlbench.config.choices import choose
from ddlbench.config.command_line import check_words
from ddlbench.config.keys import PATHS, check_value, shown, written
from ddlbench.config.schema import GROUPS
from ddlbench.errors import UserError
from ddlbench.foreign import TooLargeError, read_bytes

Plain = Mapping[str, Any]

LARGEST_BYTES = 2**18
KEY = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)*")
PLAIN_TEXT = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)  # what Hydra's grammar takes without quotes
KEYWORDS = {"null", "true", "false", "nan", "inf"}  # of Hydra's grammar, in upper and lower case
Where = Sequence[Mapping[str, list[Any]]]  # cells: those whose values on the axes are all among those of one entry

MOST_GPUS = 2**20
SCALING = {"strong": "train.global_batch", "weak": "train.batch_per_gpu"}
NAME = re.compile(r"\w[\w. -]*")  # of a file or figure: it becomes that of a folder, and of jobs
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
    printed: the paper's text in digits on what the figure shows; it stands above the first panel
    """

    kind: str
    where: Where
    best: bool = False
    by: tuple[str, ...] = ()
    printed: str = ""


def check_axis(key: Any, values: list[Any]) -> None:
    """UserError for an axis without values, with a value twice, or with one that its key cannot have."""
    for value in values:
        check_key(key, value)
    check_distinct(f"axis {shown(key)}", values)


def check_distinct(name: str, values: list[Any]) -> None:
    """UserError for a list that is empty or has a value twice."""
    if not values:
        raise UserError(f"{name}=[] has no values: give at least one")
    if len(set(map(str, values))) < len(values):
        raise UserError(f"{name}={shown(values)} names a value twice: use repeats for several runs of one cell")


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
        raise UserError(f"{key} cannot be set in a study's file or be an axis: give {key}=PATH on the command line")
    else:
        check_value(key, value)
        check_words([word(key, value)])


def settable(raw: Any, axes: Plain, place: str) -> dict[str, Any]:
    """A section of keys that a study may set. axes: of the study, whose values count instead of such keys"""
    keys = section(raw, place)
    for key, value in keys.items():
        check_key(key, value)
        if key in axes:
            raise UserError(f"{place}: {key}={shown(value)}, but {key} is an axis: leave it out, or exclude cells")
    return keys


def setting_of(raw: Any, axes: Plain) -> tuple[Where, Plain]:
    """One entry of `settings`: cells and their keys. axes: of the study"""
    content = section(raw, "settings")
    if set(content) != {"where", "keys"}:
        raise UserError("each of settings has `where` (values on axes) and `keys`")
    keys = settable(content["keys"], axes, "settings")
    if "gpus" in keys:
        raise UserError("settings cannot set gpus: make it an axis")
    return where_of(content["where"], axes, "settings"), keys


def figure_of(name: Any, raw: Any, axes: Plain) -> Figure:
    """One entry of `figures`. axes: of the study"""
    content, place = section(raw, "figures"), f"figures: {shown(name)}"
    best, printed = content.get("best", False), content.get("printed", "")
    wrong = not NAME.fullmatch(str(name)) or not set(content) <= set(Figure._fields) or "kind" not in content
    if wrong or not isinstance(best, bool) or not isinstance(printed, str):
        raise UserError(
            f"{place}: a figure has a name of letters and digits, a kind, and may have where, by, best: true | false, "
            "printed: TEXT"
        )
    where = where_of(content["where"], axes, place) if "where" in content else [{}]
    return Figure(str(content["kind"]), where, best, names_of("by", content.get("by", [])), printed)


def where_of(raw: Any, axes: Plain, place: str) -> list[dict[str, list[Any]]]:
    """The cells that entries name, one or a list. axes: of the study; place: the section's name in a message"""
    entries = list[dict[str, list[Any]]]()
    for entry in as_list(raw) or [raw]:
        where = section(entry, place)
        if not where or [] in where.values():
            raise UserError(
                f"{place}: {shown(entry)} names no cells: give axes and values of this study, or leave it out"
            )
        for key, value in where.items():
            if key not in axes or any(item not in axes[key] for item in as_list(value)):
                raise UserError(
                    f"{place}: {shown(key)}={shown(value)} is on no axis: give axes and values of this study"
                )
        entries.append({key: as_list(value) for key, value in where.items()})
    return entries


def matches(where: Where, point: Plain) -> bool:
    """Whether a point has, for one entry, one of the given values on each axis."""
    return any(all(key in point and point[key] in values for key, values in entry.items()) for entry in where)


def read(path: Path) -> dict[str, Any]:
    """A YAML file as plain data. UserError if it is not a file of plain YAML."""
    try:
        text = read_bytes(path, LARGEST_BYTES).decode()
    except TooLargeError as error:
        raise UserError(f"{path} is larger than {LARGEST_BYTES:,} bytes: is it a study?") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a study's name or its YAML file") from error
    content = _plain(text, str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys: see docs/studies.md for what a study holds")
    return cast(dict[str, Any], content)


def parse_word(word: str) -> tuple[str, Any]:
    """Key and value of a word `key=value` of the sweep's command line."""
    key, equals, text = word.partition("=")
    key = key.lstrip("+")
    if not equals or not KEY.fullmatch(key):
        raise UserError(f"{shown(word)} is no key=value: see python -m ddlbench.sweep --help")
    if key == "results_dir":
        return key, text  # as it is: YAML takes 010 for 8, and `no` for false
    if not text.strip():
        raise UserError(f"{shown(word)} is empty: give a value, or null")
    value = _plain(text, shown(word))
    if key in PATHS and isinstance(value, int | float):
        return key, text
    digits = re.findall(r"\d+", text.replace("_", ""))
    changed = any(type(item) is int and str(abs(item)) not in digits for item in as_list(value))  # 010 is 8, 1:30 is 90
    if changed or re.search(r"(^|\s)#", re.sub(r"\"[^\"]*\"|'[^']*'", "text", text)):
        raise UserError(f"{shown(word)} is {written(value)} in YAML: write digits without leading zeros, quote a text")
    return key, value


def _plain(text: str, place: str) -> Any:
    """YAML as in the files of conf/: a key stands once, 1e-3 is a number, a date is a text, and nothing has a tag of
    Python. UserError for other text. place: where it is, in the message"""
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("aliases are refused: repeat the values")  # a few could stand for a billion values
        plain = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"])))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        raise UserError(f"{place}: {' '.join(str(error).split())[:300]}") from error
    return plain["value"]


def section(raw: Any, place: str) -> dict[Any, Any]:
    """A section of keys in a study's file, {} where it is empty. place: its name in a message"""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise UserError(f"{place}: {shown(raw)} is no section of keys")
    return cast(dict[Any, Any], raw)


def as_list(value: Any) -> list[Any]:
    """A list as it is, another value as a list of one."""
    return cast(list[Any], value) if isinstance(value, list) else [value]


def names_of(key: str, raw: Any) -> tuple[str, ...]:
    """A name or a list of names. UserError for other values."""
    if not all(isinstance(value, str) for value in as_list(raw)):
        raise UserError(f"{key}={shown(raw)} must be a list of names")
    return tuple(as_list(raw))


def number(key: Any, value: Any, least: int) -> int:
    """UserError for a value that is no whole number from `least` on."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or not least <= value < 2**31:
        raise UserError(f"{key}={shown(value)} must be a whole number from {least} on")
    return cast(int, value)


def word(key: str, value: Any) -> str:
    """One word of ddlbench's command line."""
    return choose(key, _text(key, value)) if key in GROUPS else f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(_text(key, item) for item in cast(list[Any], value))}]"
    if isinstance(value, str):
        plain = PLAIN_TEXT.fullmatch(value) and value.lower() not in KEYWORDS
        return value if plain else quoted(key, value)
    if value is not None and not isinstance(value, bool | int | float):
        raise UserError(f"{key}={shown(value)} is no value: give a number, a text, true, false, null or a list")
    return written(value)


def quoted(key: str, text: str) -> str:
    """The text in double quotes, as Hydra takes it literally. UserError for characters with a meaning for Hydra."""
    if set(text) & set('"\\$'):
        raise UserError(f'{key}={shown(text)} holds ", \\ or $, which have a meaning of their own: leave them out')
    return f'"{text}"'
