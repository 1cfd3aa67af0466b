"""The YAML files of the configuration: where they are, which options they give, what their comments say. No Hydra.

A label says what was measured: an option with another option's values is refused. A field of a framework that makes
the difference between two options says so in its metadata: {"defines": NAME}, where NAME is the option in which the
field may have any value, or None if there is no such option.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import OmegaConf

from ddlbench.config.keys import shown, written
from ddlbench.errors import UserError

ADDED = ("framework", "model")  # groups without a default: + adds them
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


def _lines(group: str, choice: str) -> list[str]:
    return (conf_dir() / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines()


def choose(group: str, option: str) -> str:
    """The word that chooses an option."""
    return f"{'+' if group in ADDED else ''}{group}={option}"


def check_label(group: str, target: str, built: Any) -> None:
    """Raise UserError if `built`, an object of the class `target`, is not the option whose name it has. A name that no
    option of the program has belongs to a user's own YAML."""
    option = str(built.name)
    if option not in choices(group):
        return
    defaults = published(group, option)
    if defaults["_target_"] != target:
        raise UserError(
            f"{group}.name={option} is the name of {defaults['_target_']}, not of {shown(target)}: choose another name"
        )
    for field in fields(built):
        key, value, generic = field.name, getattr(built, field.name), field.metadata.get("defines", option)
        if generic == option or value == defaults[key]:
            continue
        named = [other for other, theirs in _others(group, option) if other != generic and theirs[key] == value]
        remedy = choose(group, named[0]) if named else f"{choose(group, generic)} {group}.{key}={written(value)}"
        raise UserError(
            f"{group}.{key}={written(value)} is not {option}, which has {written(defaults[key])}: choose {remedy}"
        )
    if group != "model":
        return
    # Sizes are free, but not all of those in which another option differs.
    for other, theirs in _others(group, option):
        if theirs["name"] != other:
            raise UserError(
                f"conf/model/{other}.yaml is a model of the name {theirs['name']}: write name: {other} there"
            )
        sizes = {key: theirs[key] for key in defaults if key != "name" and theirs.get(key) != defaults[key]}
        if sizes and all(getattr(built, key, None) == size for key, size in sizes.items()):
            words = " ".join(f"model.{key}={written(size)}" for key, size in sizes.items())
            raise UserError(f"{words} is {other}, not {option}: choose {choose('model', other)}")


def changed(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section, such as `model`, that differ from those of its option's YAML."""
    name = values.get("name")
    defaults = published(group, name) if name in choices(group) else {}
    return {
        key: values[key]
        for key in sorted(defaults)
        if key in values and key != "_target_" and values[key] != defaults[key]
    }


@cache
def holds_list(key: str) -> bool:
    """Whether the value of a key is a list, as that of model.layers."""
    group, _, name = key.partition(".")
    entries = (entry for option in choices(group) for entry in keys(group, option))
    return any(entry.name == name and entry.value.startswith("[") for entry in entries)


def defaults(group: str = ".", option: str = "config") -> dict[str, str]:
    """The option of each group that has a default, as conf/config.yaml names it, or as the YAML of another option
    replaces it."""
    entries = cast(list[dict[str, str] | str], _content(group, option).get("defaults", []))
    named = [item for entry in entries if isinstance(entry, dict) for item in entry.items()]
    return {re.sub(r"^override /|@.*", "", name): default for name, default in named}


@cache
def published(group: str, option: str) -> dict[str, Any]:
    """The keys of an option's YAML and their values there."""
    return {key: value for key, value in _content(group, option).items() if key not in ("defaults", "hydra")}


@cache
def _content(group: str, option: str) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{option}.yaml"))
    return cast(dict[str, Any], content)


def _others(group: str, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The other options of the same class, read from their YAMLs when they are asked for."""
    target = published(group, option)["_target_"]
    for other in choices(group):
        if other != option and published(group, other)["_target_"] == target:
            yield other, published(group, other)
