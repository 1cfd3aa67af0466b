"""The words of the command line, checked before Hydra composes them: a mistake is one line that says what to type."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from ddlbench.config.choices import ADDED, choices, choose
from ddlbench.config.schema import GROUPS
from ddlbench.config.values import shown
from ddlbench.errors import UserError

PARSER = OverridesParser.create()
KEY = r"(\+\+?|~)?[A-Za-z_][\w@:-]*([./][\w@:-]+)*"


class HydraOptions(argparse.ArgumentParser):
    """The options of Hydra that make sense here; its other ones start several runs or other configurations."""

    def __init__(self) -> None:
        super().__init__(prog="ddlbench", add_help=False, allow_abbrev=False)
        for names in (("--resolve",), ("--run", "-r"), ("--hydra-help",), ("--shell-completion", "-sc")):
            self.add_argument(*names, action="store_true")
        self.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
        self.add_argument("--package", "-p")
        self.add_argument("--info", "-i", nargs="?")
        self.add_argument("--config-dir", "-cd")
        self.add_argument("overrides", nargs="*")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see --help; options such as --cfg job come first or last")


# Names and kinds of the chosen options: users cannot set them. cluster.name says where a run was made.
LABELS = {*(f"{group}.name" for group in GROUPS if group != "cluster"), "model.kind", "data.kind"}


def check_command_line(arguments: Sequence[str]) -> None:
    """Raise UserError for the first word that is not valid."""
    if {"-m", "--multirun"} & set(arguments):
        raise UserError("--multirun is not available: start one run each, or use scripts/slurm/scaling.sh")
    options = HydraOptions().parse_args(list(arguments))
    if options.shell_completion:
        return  # its word is install=SHELL
    chosen = check_words(options.overrides)
    for group in ADDED:
        if group not in chosen and not (options.info or options.hydra_help):
            raise UserError(
                f"no {group}: give {choose(group, 'NAME')}, one of {', '.join(choices(group))} (see --help)"
            )


def check_words(words: Sequence[str]) -> dict[str, str]:
    """The words that choose an option, by their groups. Raise UserError for the first word that is not valid."""
    chosen: dict[str, str] = {}
    for word in words:
        override = parsed(word)
        key = override.key_or_group
        section = key.partition(".")[0]
        if "_target_" in key:
            raise UserError(f"{shown(key)} cannot be set: {choose(section, 'NAME')} chooses a class (see --help)")
        if override.is_delete():
            remedy = f"{choose(key, 'NAME')} chooses another one" if key in GROUPS else "null turns off what may be off"
            raise UserError(f"{shown(word)}: nothing can be taken away: {remedy} (see --help)")
        if key in LABELS:
            raise UserError(f"{shown(word)}: {key} belongs to the option: choose one with {choose(section, 'NAME')}")
        if re.split(r"[./]", key)[0] == "hydra" or override.package is not None:
            raise UserError(f"{shown(word)}: Hydra's own settings are fixed: give keys of ddlbench (see --help)")
        if override.is_sweep_override():
            raise UserError(
                f"{shown(word)} gives several values: start one run each (scripts/slurm/scaling.sh starts many), "
                "or write [a,b] for a list"
            )
        if key not in GROUPS:
            continue
        value = override.value()
        if not isinstance(value, str | int) or not re.fullmatch(r"\w[\w.-]*", name := str(value)) or ".." in name:
            raise UserError(
                f"{shown(word)} is no choice of one {key}: give {choose(key, 'NAME')}, one of {', '.join(choices(key))}"
            )
        if override.is_add() != (key in ADDED):
            why = "it has no default" if key in ADDED else "it has a default, which this replaces"
            raise UserError(f"{shown(word)}: write {choose(key, name)} ({why})")
        if key in chosen:
            raise UserError(f"{chosen[key]} and {word}: one run has one {key}, give it once")
        chosen[key] = word
    return chosen


@lru_cache(maxsize=2**14)  # a sweep repeats its words
def parsed(word: str) -> Override:
    """UserError for a word that Hydra's grammar refuses."""
    key, equals, value = word.partition("=")
    if equals and not re.fullmatch(KEY, key):
        raise UserError(f"{shown(word)} does not begin with a key, such as train.epochs: see --help")
    try:
        return PARSER.parse_override(word)
    except HydraException as error:
        if not equals:
            raise UserError(f"{shown(word)} is no key=value: see --help") from error
        if value.startswith("~/"):
            raise UserError(f"{shown(word)}: ~ is not replaced here: write {key}=$HOME{shown(value[1:])}") from error
        quoted = (
            shlex.quote(f'{key}="{value}"')
            if word.isprintable() and not set(value) & set('"\\')
            else f"'{key}=\"...\"'"
        )
        raise UserError(
            f"{shown(word)} has characters with a meaning of their own: put the value into double quotes and the whole "
            f"word into single quotes, {shown(quoted, 100)}"
        ) from error
