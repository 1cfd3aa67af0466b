"""Configurations, and what a framework would do with them, without a command line and without starting anything.

Hydra's compose takes about 0.4 s. Here it is called once for each combination of options, without those whose section
is their YAML; keys are then replaced in the plain data that it gave, and a section is built once for each of its
contents, so that thousands take seconds.
"""

from __future__ import annotations

import copy
import io
import json
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ddlbench.config import overrides, schema
from ddlbench.config.choices import choices, conf_dir, published
from ddlbench.config.keys import Options
from ddlbench.config.schema import GROUPS, SECTIONS, Config
from ddlbench.errors import RunError, Unavailable, UserError
from ddlbench.texts import first_line

if TYPE_CHECKING:
    from ddlbench.job import Framework, Job

Plain = dict[str, Any]
NOT_LITERAL = re.compile(r"\$\{|\?\?\?")  # what OmegaConf does not take literally
PLAIN_GROUPS = ("framework", "loader")  # their YAMLs are their sections: without interpolations and other options


@contextmanager
def configurations() -> Generator[None]:
    """Within it `configuration` finds the program's own YAMLs, as they are and with the environment as it is now."""
    _composed.cache_clear()
    _built.cache_clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield


def configuration(*words: str) -> Config:
    """What a command line of these words would run. UserError as the command line has it."""
    overrides.check_command_line(words)
    try:
        # A copy of each section, because a caller may set up its objects.
        return schema.build(
            _plain(words), lambda name, raw: copy.deepcopy(_built(name, json.dumps(raw, sort_keys=True)))
        )
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(hydra_line(error)) from error


def hydra_line(error: BaseException) -> str:
    """The several lines of an error of Hydra or OmegaConf as one: the key, what is wrong, the choices there are."""
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        return schema.unknown_key(str(cause.full_key), [str(key) for key in cause.parent_node])
    if isinstance(error, OmegaConfBaseException):
        key = re.search(r"^ *full_key: \.*(\S+)", str(error), re.MULTILINE)
        return f"{key[1]}: {first_line(error)}" if key else first_line(error)
    text = " ".join(str(error).split())
    return text.partition(" Config search path:")[0].partition(" Set the env")[0]


def _plain(words: Sequence[str]) -> Plain:
    """The composed configuration as plain data, and the words' values in it."""
    parsed = {word: overrides.parsed(word) for word in words}
    sections, chosen = Plain(), list[str]()
    for word, override in parsed.items():
        group, option = override.key_or_group, str(override.value())
        if group in PLAIN_GROUPS and option in choices(group):
            sections[group] = published(group, option)
        elif group in GROUPS:
            chosen.append(word)
    composed = _composed(*sorted(chosen)) | sections
    plain = {key: dict(value) if isinstance(value, dict) else value for key, value in composed.items()}
    others = [override for override in parsed.values() if override.key_or_group not in GROUPS]
    return plain if all(_replace(plain, override) for override in others) else _compose(words)


@cache
def _composed(*words: str) -> Plain:
    """`_compose`, once for the same options. A caller copies what it changes."""
    return _compose(words)


def _compose(words: Sequence[str]) -> Plain:
    """The plain data as Hydra itself composes them."""
    return cast(Plain, OmegaConf.to_container(compose("config", list(words)), resolve=True, throw_on_missing=True))


def _replace(plain: Plain, override: Override) -> bool:
    """Give a key another value; False for what only Hydra can do: a key that is added, a section, an interpolation.
    plain: its first two levels are a copy"""
    *path, leaf = override.key_or_group.split(".")
    value = override.value()
    for depth, part in enumerate(path):
        section = plain.get(part)
        if not isinstance(section, dict):
            return False
        plain[part] = section = cast(Plain, section) if depth == 0 else dict(cast(Plain, section))
        plain = section
    simple = not isinstance(value, dict) and not isinstance(plain.get(leaf), dict)
    if override.type != OverrideType.CHANGE or leaf not in plain or not simple or NOT_LITERAL.search(str(value)):
        return False
    plain[leaf] = value
    return True


@cache
def _built(name: str, content: str) -> Any:
    """A section's object from its JSON."""
    return schema.section(name, json.loads(content))


def supports(framework: Framework, job: Job) -> None:
    """Raise Unsupported or UserError for what cannot be run whatever is installed: the same on every machine."""
    getattr(framework, "supports", framework.check)(job)


def refusal(ask: Callable[[], object]) -> str | None:
    """Why `ask` refuses, None if it does not. Unavailable is raised: without the library there is no answer."""
    try:
        ask()
    except Unavailable:
        raise
    except RunError as error:
        return str(error)
    return None


@contextmanager
def quiet() -> Generator[None]:
    """Hide what libraries print and warn of while they are imported."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def recorded_configuration(recorded: Mapping[str, Any]) -> Config:
    """The configuration of a record, built from the program's classes. UserError if this version has other keys or
    lacks an option."""
    plain: dict[str, Any] = {key: dict(recorded.get(key, {})) for key in SECTIONS}  # `checkpoint` came later
    for group in GROUPS:
        option = plain[group]["name"]
        if option not in choices(group):
            raise UserError(f"{group}={option} is no option of this version")
        plain[group]["_target_"] = published(group, option)["_target_"]
    keys = {field.name for field in fields(Options)}
    return schema.build(plain | {key: value for key, value in recorded.items() if key in keys})
