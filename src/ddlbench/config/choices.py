"""The YAML files of the configuration: where they are, which choices they give, what their comments say. No Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: (?P<value>.*?))??(?: *# (?P<comment>.*))?")


class Key(NamedTuple):
    """One key of a YAML file: dotted name below the file's group, value as written there, comment ("" for none)."""

    name: str
    value: str
    comment: str


def conf_dir() -> Path:
    """The configuration groups: the wheel's own copy if there is one, else the repository's."""
    package = Path(__file__).parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parents[1] / "conf"


@cache
def choices(group: str) -> tuple[str, ...]:
    """The options of a group, sorted. Each check of a configuration needs them, and a study has thousands of checks."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


@cache
def targets(group: str) -> frozenset[str]:
    """The classes that the YAML files of a group name."""
    return frozenset(key.value for choice in choices(group) for key in keys(group, choice) if key.name == "_target_")


def title(group: str, choice: str) -> str:
    """The comment above the keys: what this choice is."""
    above = takewhile(lambda line: line.startswith("#"), _lines(group, choice))
    return " ".join(line.lstrip("# ") for line in above)


def keys(group: str, choice: str) -> Iterator[Key]:
    """All keys of a YAML file with their comments; keys of a section as section.key. Hydra's own parts are left out."""
    section, skipped = "", False
    for line in filter(None, map(LINE.fullmatch, _lines(group, choice))):
        name, value, comment = line["name"], line["value"] or "", line["comment"] or ""
        if not line["indent"]:
            skipped, section = name in ("defaults", "hydra"), "" if value else f"{name}."
            if value:
                yield Key(name, value, comment)
        elif not skipped:
            yield Key(section + name, value, comment)


def meanings(group: str) -> dict[str, str]:
    """What each key of a group means. Where several files have a key, one of them explains it."""
    meaning: dict[str, str] = {}
    for choice in choices(group):
        for key in keys(group, choice):
            if key.comment:
                meaning.setdefault(key.name, key.comment)
    return meaning


def _lines(group: str, choice: str) -> list[str]:
    return (conf_dir() / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines()
