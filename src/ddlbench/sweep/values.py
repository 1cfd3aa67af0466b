"""A small, safe part of YAML as plain data, and its values as words of ddlbench's command line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from ddlbench.config.choices import choose
from ddlbench.config.schema import GROUPS
from ddlbench.config.values import shown
from ddlbench.errors import UserError

Plain = Mapping[str, Any]

LARGEST_BYTES = 2**18
DEEPEST = 8  # levels of nesting
KEY = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)*")
PLAIN_TEXT = re.compile(r"[A-Za-z_][\w.-]*")
KEYWORDS = {"null", "true", "false", "nan", "inf"}  # of Hydra's grammar, in upper and lower case


def read(path: Path) -> dict[str, Any]:
    """A YAML file as plain data. UserError if it is not a file of plain YAML."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_BYTES + 1)
        if len(raw) > LARGEST_BYTES:
            raise UserError(f"{path} is larger than {LARGEST_BYTES:,} bytes: is it a study?")
        content = parsed(raw.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a study's name or its YAML file") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys: see docs/studies.md for what a study holds")
    return cast(dict[str, Any], content)


def parsed(text: str) -> Any:
    """YAML as plain data: no tags, anchors, aliases, each key once. ValueError or yaml.YAMLError for other text."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):  # as a stream: nothing is built that is too deep
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} levels deep")
        if getattr(event, "anchor", None) is not None:
            raise ValueError(f"anchors and aliases (&{event.anchor}, *{event.anchor}) are refused: repeat the values")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"tags ({event.tag}) are refused: write plain values")
    data = _KeysOnce(text).get_single_data()
    _check_plain(data)
    return data


class _KeysOnce(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML's loader would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(str(key.value) for key, _ in node.value)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"the key {shown(twice[0])} is given twice: keep one")
        return super().construct_mapping(node, deep)


def parse_word(word: str) -> tuple[str, Any]:
    """Key and value of a word `key=value` of the sweep's command line."""
    key, equals, text = word.partition("=")
    key = key.lstrip("+")
    if not equals or not KEY.fullmatch(key):
        raise UserError(f"{shown(word)} is no key=value: see python -m ddlbench.sweep --help")
    if key == "results_dir":
        return key, text  # as it is: YAML takes 010 for 8, and `no` for false
    try:
        return key, parsed(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{shown(word)}: {' '.join(str(error).split())[:200]}") from error


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
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"{key}={shown(value)} is no value: give a number, a text, true, false, null or a list")
    if PLAIN_TEXT.fullmatch(value) and value.lower() not in KEYWORDS:
        return value
    return quoted(key, value)


def quoted(key: str, text: str) -> str:
    """The text in double quotes, as Hydra takes it literally. UserError for characters with a meaning for Hydra."""
    if set(text) & set('"\\$'):
        raise UserError(f'{key}={shown(text)} holds ", \\ or $, which have a meaning of their own: leave them out')
    return f'"{text}"'


def _check_plain(value: Any) -> None:
    if isinstance(value, dict | list):
        content = cast(dict[Any, Any] | list[Any], value)
        for item in [*content, *content.values()] if isinstance(content, dict) else content:
            _check_plain(item)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(
            f"{value} is a {type(value).__name__}: write a number, a text, true, false, null, a list or keys"
        )
