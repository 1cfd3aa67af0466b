"""Configurations, the jobs that they ask ranks for, and what a framework would do with them, without a command line and
without starting anything. A configuration alone needs no torch.

Hydra takes about 0.4 s to compose a configuration. Here its plain data are put together from the YAMLs in the same way,
and a section is built once for each of its contents, so that thousands of configurations take seconds.
"""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ddlbench.config import schema
from ddlbench.config.choices import choices, choose, defaults, published
from ddlbench.config.command_line import check_command_line, parsed
from ddlbench.config.keys import Options
from ddlbench.config.schema import GROUPS, SECTIONS, Config
from ddlbench.errors import RunError, Unavailable, UserError
from ddlbench.foreign import section
from ddlbench.texts import first_line

if TYPE_CHECKING:
    import torch

    from ddlbench.job import Framework, Job
    from ddlbench.ranks.launchers import Launch
    from ddlbench.recomputation import Link

Plain = dict[str, Any]
MEANINGS = {  # of OmegaConf's words, which name its own classes
    "is not a ListConfig": "{} must be a list, such as [1,2]",
    "is not a subclass of": "{} is a section of keys: give single keys, such as {}.name=NAME (see --help)",
}
NOT_LITERAL = re.compile(r"\$\{|\?\?\?")  # what OmegaConf does not take literally


def configuration(*words: str) -> Config:
    """What a command line of these words would run. UserError as the command line has it."""
    check_command_line(words)
    overrides = [parsed(word) for word in words]
    chosen = {override.key_or_group: str(override.value()) for override in overrides if override.key_or_group in GROUPS}
    options = defaults()
    for group, option in chosen.items():
        if option not in choices(group):
            raise UserError(f"{choose(group, option)} does not exist: choose one of {', '.join(choices(group))}")
        options |= defaults(group, option)
    options |= chosen
    # The plain data that Hydra would compose: the YAML of each chosen option, then the values of the words.
    plain = copy.deepcopy(published(".", "config") | {group: published(group, options[group]) for group in GROUPS})
    for override in overrides:
        if override.key_or_group not in GROUPS:
            _set(plain, override.key_or_group, override.value())
    try:
        if NOT_LITERAL.search(str(plain)):
            plain = cast(Plain, OmegaConf.to_container(OmegaConf.create(plain), resolve=True, throw_on_missing=True))
        return schema.build(plain)
    except OmegaConfBaseException as error:
        raise UserError(hydra_line(error)) from error


def hydra_line(error: BaseException) -> str:
    """The several lines of an error of Hydra or OmegaConf as one: the key, what is wrong, the choices there are."""
    for cause in (error, error.__cause__):
        if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
            return schema.unknown_key(str(cause.full_key), [str(key) for key in cause.parent_node])
    if isinstance(error, OmegaConfBaseException):
        key, line = re.search(r"^ *full_key: \.*(\S+)", str(error), re.MULTILINE), first_line(error)
        if key is None:
            return line
        meaning = next((meaning for words, meaning in MEANINGS.items() if words in line), None)
        return meaning.replace("{}", key[1]) if meaning else f"{key[1]}: {line}"
    text = " ".join(str(error).split())
    return text.partition(" Config search path:")[0].partition(" Set the env")[0]


def _set(plain: Plain, key: str, value: object) -> None:
    """Give a dotted key another value; a section keeps the keys that the value does not name."""
    *path, leaf = key.split(".")
    for depth, part in enumerate(path, 1):
        if part not in plain:
            raise UserError(schema.unknown_key(".".join(path[:depth]), plain))
        if not isinstance(plain := plain[part], dict):
            raise UserError(f"{key}: {'.'.join(path[:depth])} has no keys: give its complete value")
    before = plain.get(leaf)
    both = isinstance(value, dict) and isinstance(before, dict)
    plain[leaf] = cast(Plain, before) | cast(Plain, value) if both else value


def make_job(config: Config, launch: Launch, device: torch.device) -> Job:
    """The job that the configuration asks this rank for."""
    from ddlbench.job import Job
    from ddlbench.recipe.optimizers import make_optimizer
    from ddlbench.recipe.recipe import CrossEntropy

    train, recipe = config.train, config.recipe
    # A job has the keys of `train.` that frameworks see, under their names.
    shared = {key: value for key, value in vars(train).items() if key in Job.__dataclass_fields__}
    shared["global_batch"] = train.samples_per_update(launch.world_size)
    return Job(
        model=config.model,
        loss=CrossEntropy(recipe.label_smoothing),
        optimizer=partial(make_optimizer, recipe.optimizer),
        device=device,
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        links=counted_links,
        **shared,
    )


def counted_links(job: Job, samples: float) -> list[Link]:
    """What `Job.links` is: the counts of the model's blocks, each complete."""
    from ddlbench.counts.counting import count_job  # takes a second

    return [block.link(samples) for block in count_job(job, job.device.type).blocks]


def supports(framework: Framework, job: Job) -> None:
    """Raise Unsupported or UserError for what cannot be run whatever is installed: the same on every machine."""
    getattr(framework, "supports", framework.check)(job)


def refusal(ask: Callable[[], object]) -> str | None:
    """Why `ask` refuses; None if it does not. Unavailable is raised: without the library there is no answer."""
    try:
        ask()
    except Unavailable:
        raise
    except RunError as error:
        return str(error)
    return None


@contextmanager
def quiet() -> Generator[None]:
    """Hide what libraries print, and their warnings, while they are imported."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def recorded_configuration(recorded: Mapping[str, Any]) -> Config:
    """The configuration of a record, built from the program's classes. UserError if this version has other keys or
    lacks an option, or the record a section."""
    plain: dict[str, Any] = {key: dict(section(recorded, key)) for key in SECTIONS}  # `checkpoint` came later
    for group in GROUPS:
        option = "local" if group == "cluster" else plain[group].get("name")  # a cluster's name is free
        if option not in choices(group):
            raise UserError(f"{group}={option} is no option of this version")
        plain[group]["_target_"] = published(group, option)["_target_"]
    for name, values in plain.items():  # a key without a value that was removed since then changed nothing
        for key in values.keys() - {field.name for field in fields(schema.class_of(name, values))}:
            if values[key] is None:
                del values[key]
    keys = {field.name for field in fields(Options)}
    return schema.build(plain | {key: value for key, value in recorded.items() if key in keys})
