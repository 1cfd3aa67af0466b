"""The words of the command line. --help shows the choices and keys with the comments of the YAML files. Words are
checked before Hydra composes them: the message for a mistake is one line that says what to type."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

import ddlbench
from ddlbench.config.choices import ADDED, choices, choose, defaults, keys, title
from ddlbench.config.keys import PATHS, shown
from ddlbench.config.schema import GROUPS
from ddlbench.errors import UserError

HEAD = """\
ddlbench {version}: one training loop, many frameworks for parallel training, one table.

  python -m ddlbench +framework=NAME +model=NAME [key=value ...]                   one process
  torchrun --nproc-per-node=4 -m ddlbench +framework=NAME +model=NAME [...]        one node
  srun -N2 --ntasks-per-node=4 --gpus-per-node=4 python -m ddlbench +framework=... Slurm, one task a GPU
  python -m ddlbench.report RESULTS                                                tables, figures, page
  python -m ddlbench.doctor                                                        what this machine can run
  python -m ddlbench.predict +model=NAME cluster=NAME gpus=[4,8,...,1024]          step time and memory elsewhere
  python -m ddlbench +framework=... mode=rehearsal rehearsal.gpus=1024             one rank of a job, without devices

  --help      this text; with +framework=NAME and other choices it shows their keys
  --version   the version of ddlbench
  --cfg job   print the whole configuration; dryrun=true checks it as well
  A value with spaces, commas, brackets or ~ needs both kinds of quotes: 'data.root="/a path/images"'
"""
WIDTH, COLUMN = 120, 34
PARSER = OverridesParser.create()
KEY = r"(\+\+?|~)?[A-Za-z_][\w@:-]*([./][\w@:-]+)*"
# Names and kinds of the chosen options: users cannot set them. cluster.name says where a run was made.
LABELS = {*(f"{group}.name" for group in GROUPS if group != "cluster"), "model.kind", "data.kind"}


def help_text(words: Sequence[str]) -> str:
    """words: the command line, whose choices decide which keys are shown"""
    given = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    chosen = {group: given.get(group, defaults().get(group, "")) for group in GROUPS}
    lines = [HEAD.format(version=ddlbench.__version__)]
    for group in GROUPS:
        lines.append(choose(group, "NAME"))
        for choice in choices(group):
            default = " (default)" if defaults().get(group) == choice else ""
            lines.append(_row(f"{choice}{default}", title(group, choice)))
        lines.append("")
    lines += ["Keys, each with its default", *_keys("", ".", "config"), ""]
    for group, choice in chosen.items():
        if choice in choices(group):
            lines += [f"Keys of {group}={choice}", *_keys(f"{group}.", group, choice), ""]
        else:
            lines += [f"Keys of {group}: give --help +{group}=NAME", ""]
    return "\n".join(lines)


def _keys(prefix: str, group: str, choice: str) -> list[str]:
    """The keys of an option. A comment that it lacks is that of the first option of the group that has one."""
    comments = {
        key.name: key.comment for other in reversed(choices(group)) for key in keys(group, other) if key.comment
    }
    return [
        _row(f"{prefix}{key.name}={key.value}", key.comment or comments.get(key.name, ""))
        for key in keys(group, choice)
        if key.name != "_target_"
    ]


def _row(left: str, right: str) -> str:
    """Two columns; a long left one takes a line of its own."""
    first = f"  {left:{COLUMN - 2}}" if len(left) < COLUMN - 3 else f"  {left}\n{'':{COLUMN}}"
    return textwrap.fill(right, WIDTH, initial_indent=first, subsequent_indent=" " * COLUMN) if right else f"  {left}"


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


def check_command_line(arguments: Sequence[str]) -> None:
    """Raise UserError for the first word that is not valid."""
    if {"-m", "--multirun"} & set(arguments):
        raise UserError("--multirun is not available: start one run each, or use scripts/slurm/scaling.sh")
    options = HydraOptions().parse_args(list(arguments))
    if options.shell_completion:
        return  # its word is install=SHELL
    if options.resolve and not options.cfg:
        raise UserError("--resolve changes what --cfg prints: give --cfg job, too")
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
        if key not in GROUPS and override.is_add():
            there = {entry.name for entry in keys(".", "config")}
            there |= {f"{section}.{entry.name}" for option in choices(section) for entry in keys(section, option)}
            if key in there:
                raise UserError(f"{shown(word)}: write {key}=VALUE (+ adds a key, and this one exists)")
        value = override.value()
        if key in PATHS and isinstance(value, int | float) and str(value) != (text := word.partition("=")[2]):
            raise UserError(f"{shown(word)} is the number {value}: quote a text, '{key}=\"{text}\"'")
        if key not in GROUPS:
            continue
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
        repeated = word.isprintable() and not set(value) & set('"\\')
        quoted = shlex.quote(f'{key}="{value if repeated else "..."}"')
        raise UserError(
            f"{shown(word)} has characters with a meaning of their own: put the value into double quotes and the whole "
            f"word into single quotes, {shown(quoted, 100)}"
        ) from error
