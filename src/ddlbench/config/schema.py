"""The whole configuration as dataclasses, and its checks. Hydra composes it; nothing below this file knows Hydra."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddlbench.config import choices
from ddlbench.config.keys import (
    Checkpoint,
    Options,
    RehearsalKeys,
    Train,
    added_later,
    check_value,
    measured_part,
    shown,
)
from ddlbench.errors import UserError

if TYPE_CHECKING:
    from ddlbench.data.feed import Dataset, Loader
    from ddlbench.job import Framework, Model
    from ddlbench.ranks.launch import Cluster
    from ddlbench.recipe.recipe import Recipe

GROUPS = ("framework", "model", "loader", "data", "recipe", "cluster")
SECTIONS = (*GROUPS, "train", "checkpoint")


@dataclass(kw_only=True)
class Config(Options):
    """One run: the keys of no section, and each group built into the object that does the work."""

    framework: Framework
    model: Model
    loader: Loader
    data: Dataset
    recipe: Recipe
    cluster: Cluster
    train: Train
    checkpoint: Checkpoint
    rehearsal: RehearsalKeys = field(default_factory=RehearsalKeys)  # of no record: nothing is measured

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "rehearsal" and self.rehearsal != RehearsalKeys():
            raise UserError(f"the keys of rehearsal describe a job for mode=rehearsal, mode={self.mode} ignores them")
        if self.checkpoint.every is not None and self.mode != "train":
            raise UserError(
                f"checkpoint.every={self.checkpoint.every} saves a model in training, mode={self.mode} has none: "
                "leave it out, or choose mode=train"
            )
        if self.model.kind != self.data.kind:
            fitting = "sample_images or imagenet" if self.model.kind == "images" else "sample_text or wikitext103"
            raise UserError(
                f"model {self.model.name} takes {self.model.kind}, data {self.data.name} holds {self.data.kind}: "
                f"choose data={fitting}"
            )

    @property
    def resolved(self) -> dict[str, Any]:
        """This configuration as plain data, for the record."""
        settings = {key.name: getattr(self, key.name) for key in fields(Options)}
        return settings | {name: asdict(getattr(self, name)) for name in SECTIONS}

    def identity(self) -> dict[str, Any]:
        """What was to be measured: the configuration without what does not change a measurement."""
        return measured_part(self.resolved, added_later(self))


# The sections that are no group, with their classes; "": the keys of no section.
CLASSES: dict[str, type] = {"": Options, "train": Train, "checkpoint": Checkpoint, "rehearsal": RehearsalKeys}
KEY_OF = {"train": "train.epochs=3", "checkpoint": "checkpoint.every=1", "rehearsal": "rehearsal.gpus=8"}


def class_of(name: str, raw: dict[str, Any]) -> type:
    """The class of a section, "" for the keys that belong to none; a group's `_target_` names it."""
    if name in CLASSES:
        return CLASSES[name]
    module, _, class_name = str(raw["_target_"]).rpartition(".")
    return getattr(importlib.import_module(module), class_name)


def section(name: str, raw: dict[str, Any]) -> Any:
    """The object of a section, its fields filled from the keys, in the types of the fields: a `1` given for a float is
    1.0."""
    cls = class_of(name, raw)
    keys = {key.name for key in fields(cls)}
    raw = {key: value for key, value in raw.items() if key != "_target_"}
    if unknown := sorted(str(key) for key in set(raw) - keys):
        raise UserError(unknown_key(f"{name}.{unknown[0]}" if name else unknown[0], keys))
    check_value(name, raw)
    try:
        merged = cast(DictConfig, OmegaConf.merge(_typed(name, cls), {name: raw}))
    except OmegaConfBaseException as error:
        if error.full_key:
            raise
        raise UserError(f"{name} has a list where keys belong, or keys where a list belongs: see --help") from error
    check_value(name, OmegaConf.to_container(merged[name]))  # once more: texts such as 'nan' have become numbers
    return OmegaConf.to_object(merged[name])


@cache
def _made(name: str, content: str) -> Any:
    """`section` from JSON, once for each content: a study has thousands of configurations of few sections."""
    return section(name, json.loads(content))


@cache
def _typed(name: str, cls: type) -> DictConfig:
    """The types and defaults of a section's fields, under its name, so that an error names the key. Read from the class
    once, which takes longer than to merge values into a copy."""
    return OmegaConf.create({name: OmegaConf.structured(cls)})


def resolve(composed: DictConfig) -> Config:
    """Build every group of a composed configuration. UserError or OmegaConfBaseException for a wrong value."""
    return build(cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)))


def build(plain: dict[str, Any]) -> Config:
    """A configuration from plain data. OmegaConfBaseException for a value of another type than its key's."""
    sections: dict[str, dict[str, Any]] = {}
    for name in (*SECTIONS, "rehearsal"):
        raw = plain.get(name, {} if name == "rehearsal" else None)
        if not isinstance(raw, dict) or (name in GROUPS and "_target_" not in raw):
            remedy = f"choose one with {name}=NAME" if name in GROUPS else f"give single keys, such as {KEY_OF[name]}"
            raise UserError(f"{name}={shown(raw)} is no section of keys: {remedy} (see --help)")
        sections[name] = cast(dict[str, Any], raw)
    others = {key: value for key, value in plain.items() if key not in sections}
    for key in sorted(set(others) - {option.name for option in fields(Options)}):
        raise UserError(unknown_key(key, plain.keys() - {key}))
    sections[""] = others
    # A copy of each object, because a caller may change it.
    built = {name: copy.deepcopy(_made(name, json.dumps(raw))) for name, raw in sections.items()}
    for group in GROUPS:
        choices.check_label(group, str(sections[group]["_target_"]), built[group])
    return Config(**vars(built.pop("")), **built)


def unknown_key(full_key: str, beside: Collection[str]) -> str:
    """The message for a key that does not exist. beside: the keys of its section"""
    group, _, key = full_key.rpartition(".")
    keys = sorted(set(beside) - {"_target_", "hydra"})
    near = get_close_matches(key, keys, 1)
    remedy = f"did you mean {f'{group}.' if group else ''}{near[0]}?" if near else ""
    there = f"the keys{f' of {group}' if group else ''} are {', '.join(keys)}"
    return f"{shown(full_key)} does not exist: {remedy or there}"
