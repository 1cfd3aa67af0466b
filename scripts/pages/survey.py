"""Runs the checks of every framework for every model, precision and option; docs/frameworks.md shows the answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple, get_args, get_type_hints

import torch

from ddlbench.config.choices import choices, keys
from ddlbench.config.compose import configuration, make_job, refusal, supports
from ddlbench.config.keys import PRECISIONS, written
from ddlbench.config.schema import Config
from ddlbench.job import Framework
from ddlbench.ranks.launch import Launch
from ddlbench.recipe.optimizers import optimizers
from ddlbench.results.rows import group_by
from ddlbench.run.checkpoints import check_checkpoints

RANKS = (4, 1)  # tried in this order: the first number that a framework accepts is used
CUDA, CPU = torch.device("cuda"), torch.device("cpu")  # names only: no device is touched

Change = Callable[[Config], Config]
Questions = dict[str, dict[str, Change]]  # what is changed -> framework -> how


class Case(NamedTuple):
    model: str  # or a family of models
    precision: str


Answers = Mapping[Case, str | None]  # why it is refused; None: it runs


def setting(section: str, **values: Any) -> Change:
    """Other values of keys of a section."""
    return lambda config: replace(config, **{section: replace(getattr(config, section), **values)})


UNCHANGED = setting("train")
COMPUTING: dict[str, Change] = {
    "train.checkpoint_activations=true": setting("train", checkpoint_activations=True),
    "train.offload_activations=true": setting("train", offload_activations=True),
    "train.compile=true": setting("train", compile=True),
    "both": setting("train", checkpoint_activations=True, compile=True),
    "train.channels_last=true": setting("train", channels_last=True),
    "train.micro_batch=8": setting("train", micro_batch=8),
}
UPDATING: dict[str, Change] = {
    "train.reduce_dtype=fp16": setting("train", reduce_dtype="fp16"),
    "train.reduce_dtype=bf16": setting("train", reduce_dtype="bf16"),
    "train.clip_norm=1": setting("train", clip_norm=1.0),
    "checkpoint.every=1": setting("checkpoint", every=1),
}
RECIPES = sorted(name for name, entry in optimizers.items() if entry.needs)  # those that shards may refuse


@dataclass(frozen=True)
class Survey:
    """All frameworks and models by the names of their YAMLs, and the results of the checks."""

    frameworks: Mapping[str, Framework]
    models: Mapping[str, Config]
    updating: Mapping[str, Change]

    @classmethod
    def compose(cls) -> Survey:
        frameworks = {name: configuration(f"+framework={name}", "+model=resnet50") for name in choices("framework")}
        models = {name: configuration("+framework=single", f"+model={name}") for name in choices("model")}
        updating = dict(UPDATING)
        for name in RECIPES:
            made = configuration("+framework=single", "+model=resnet50", f"recipe={name}").recipe
            updating[f"recipe={name}"] = partial(replace, recipe=made)
        return cls({name: config.framework for name, config in frameworks.items()}, models, updating)

    @cached_property
    def families(self) -> dict[str, Config]:
        """One model of each family."""
        return {type(config.model).__name__: config for config in self.models.values()}

    @cached_property
    def groups(self) -> list[list[str]]:
        """Frameworks of one class together."""
        groups = group_by(self.frameworks, lambda name: type(self.frameworks[name]).__qualname__)
        return [groups[kind] for kind in sorted(groups)]

    @cached_property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The number of ranks in the checks of each framework: one at which it runs some model."""
        chosen: dict[str, int] = {}
        for name, ranks in product(self.frameworks, RANKS):
            if name not in chosen and None in (self._refusal(name, one, CUDA, ranks) for one in self.families.values()):
                chosen[name] = ranks
        return {name: chosen.get(name, RANKS[0]) for name in self.frameworks}

    def answers(
        self, framework: str, models: Mapping[str, Config], change: Change = UNCHANGED, device: torch.device = CUDA
    ) -> Answers:
        """For each model in each precision."""
        ranks = self.ranks[framework]
        precisions = {precision: setting("train", precision=precision) for precision in PRECISIONS}
        return {
            Case(name, precision): self._refusal(framework, in_precision(config), device, ranks, change)
            for name, config in models.items()
            for precision, in_precision in precisions.items()
        }

    def _refusal(
        self, framework: str, config: Config, device: torch.device, ranks: int, change: Change = UNCHANGED
    ) -> str | None:
        def ask() -> None:
            asked = change(replace(config, framework=self.frameworks[framework]))
            job = make_job(asked, Launch("torchrun", world_size=ranks), device)
            supports(asked.framework, job)
            check_checkpoints(asked, job)

        return refusal(ask)

    def changed(self, framework: str, change: Change, device: torch.device = CUDA) -> tuple[Answers, list[Case]]:
        """The results, with the change, of the cases that run without it, and the cases that run only with it: one
        model of each family."""
        before, after = (self.answers(framework, self.families, how, device) for how in (UNCHANGED, change))
        gained = [case for case, reason in after.items() if reason is None and before[case] is not None]
        return {case: reason for case, reason in after.items() if before[case] is None}, gained

    def tried(self, knobs: Mapping[str, Knob]) -> Questions:
        """For each key the other values of a switch or a choice, 2 for a number, in each framework that has the key."""
        questions: Questions = {}
        for key, (meaning, files) in knobs.items():
            for name in files:
                adapter = self.frameworks[name]
                kind = get_type_hints(type(adapter))[key]
                kinds = get_args(kind) or (kind,)
                # The words of a comment such as "none | fp16: what travels".
                words = [part.partition(":")[0].strip() for part in meaning.split("|")]
                named = [word for word in words if re.fullmatch(r"\w+", word)]
                values: list[Any] = [False, True] if bool in kinds else named if str in kinds else []
                values += [2] if int in kinds or float in kinds else []
                for value in values:
                    if value != getattr(adapter, key):
                        questions.setdefault(f"{key}={written(value)}", {})[name] = setting("framework", **{key: value})
        return questions


class Knob(NamedTuple):
    """A key of one or more YAMLs: what their comments say, and its values there, by the YAML's name."""

    meaning: str
    values: dict[str, str]


def knobs(frameworks: Sequence[str]) -> dict[str, Knob]:
    """All keys of YAMLs of one class but those that name it."""
    entries = [(framework, key) for framework in frameworks for key in keys("framework", framework)]
    result: dict[str, Knob] = {}
    for name, same in group_by(entries, lambda entry: entry[1].name).items():
        comments = dict.fromkeys(key.comment for _, key in same if key.comment)
        result[name] = Knob("; ".join(comments), {framework: key.value for framework, key in same})
    return {name: key for name, key in result.items() if name not in ("_target_", "name")}
