"""The whole configuration as dataclasses, and its checks. Hydra composes it; nothing below this file knows Hydra."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddlbench.config import options, values
from ddlbench.config.checkpoint import Checkpoint
from ddlbench.config.identity import added_later, measured_part
from ddlbench.config.rehearsal import RehearsalKeys
from ddlbench.errors import UserError
from ddlbench.ranks.launch import SHARED_GPU

if TYPE_CHECKING:
    from ddlbench.data.feed import Dataset, Loader
    from ddlbench.job import Framework, Model
    from ddlbench.ranks.launch import Cluster
    from ddlbench.recipe.recipe import Recipe

MODES = ("train", "loader", "rehearsal")
PRECISIONS = ("fp32", "bf16", "fp16")
POSITIVE = (
    "epochs", "steps", "global_batch", "batch_per_gpu", "micro_batch", "threads_per_rank", "timeout_s",
    "time_limit_s",
)  # fmt: skip
BATCH_PER_GPU = 32  # where no batch is given
GROUPS = ("framework", "model", "loader", "data", "recipe", "cluster")
SECTIONS = (*GROUPS, "train", "checkpoint")


@dataclass
class Train:
    """`train.`: the same words for every framework; conf/config.yaml says what each means."""

    epochs: int = 2
    steps: int | None = None
    warmup_steps: int = 2
    global_batch: int | None = None
    batch_per_gpu: int | None = None
    micro_batch: int | None = None
    precision: str = "fp32"
    tf32: bool = False
    cudnn_benchmark: bool | None = None
    reduce_dtype: str = "fp32"
    clip_norm: float | None = None
    checkpoint_activations: bool = False
    compile: bool = False
    channels_last: bool = False
    seed: int = 0
    repeat: int = 0
    threads_per_rank: int = 1
    validate: bool = True
    timeout_s: float = 600.0
    deterministic: bool = field(default=False, metadata={"before": False})
    cold_cache: bool = field(default=False, metadata={"before": False})
    time_limit_s: float | None = field(default=None, metadata={"before": None})

    def __post_init__(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"train.{name}={value} must be greater than 0")
        for name in ("warmup_steps", "seed", "repeat"):
            if getattr(self, name) < 0:
                raise UserError(f"train.{name}={getattr(self, name)} must not be negative")
        for name in ("precision", "reduce_dtype"):
            if getattr(self, name) not in PRECISIONS:
                raise UserError(f"train.{name}={getattr(self, name)} is unknown: choose one of {', '.join(PRECISIONS)}")
        if self.global_batch is not None and self.batch_per_gpu is not None:
            raise UserError(
                f"train.global_batch={self.global_batch} and train.batch_per_gpu={self.batch_per_gpu} say the same "
                "thing twice: give one of them"
            )
        if self.deterministic and self.cudnn_benchmark:
            raise UserError(
                "train.deterministic=true and train.cudnn_benchmark=true exclude each other, because autotuning may "
                "choose another algorithm in every run: leave train.cudnn_benchmark out"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UserError(f"train.clip_norm={self.clip_norm} must be greater than 0; null turns clipping off")

    def samples_per_update(self, world_size: int) -> int:
        """The global batch. `batch_per_gpu` counts every device, whatever the layout."""
        if self.global_batch is not None:
            return self.global_batch
        return (self.batch_per_gpu or BATCH_PER_GPU) * world_size


@dataclass
class Options:
    """The keys that belong to no section."""

    mode: str = "train"
    results_dir: str = "results"
    profile: bool = False
    profile_steps: int = 10
    profile_trace: bool = False
    dryrun: bool = False
    progress: bool = True
    backend: str | None = field(default=None, metadata={"before": None})
    preflight: bool = False
    preflight_warn: float = 1.5
    preflight_stop: float | None = 4.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"mode={self.mode} is unknown: choose one of {', '.join(MODES)}")
        if self.profile_steps <= 0:
            raise UserError(f"profile_steps={self.profile_steps} must be greater than 0")
        if self.profile and self.mode != "train":
            raise UserError(f"profile=true needs a model to train, mode={self.mode} has none: choose mode=train")
        if self.profile_trace and not self.profile:
            raise UserError("profile_trace=true keeps the trace of a profiled window: set profile=true too")
        for name in ("preflight_warn", "preflight_stop"):
            if (factor := getattr(self, name)) is not None and factor <= 1:
                raise UserError(f"{name}={factor} must be greater than 1: so many times as slowly as the median rank")
        if self.backend not in (None, SHARED_GPU):
            raise UserError(f"backend={self.backend} is unknown: choose null, or {SHARED_GPU} (ranks share a GPU)")


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

    @property
    def added_later(self) -> dict[str, Any]:
        """The keys that were added after the first version, with the value that means as before."""
        added = added_later(Options)
        for name in SECTIONS:
            added |= added_later(getattr(self, name), f"{name}.")
        return added

    def identity(self) -> dict[str, Any]:
        """What was to be measured: the configuration without what does not change a measurement."""
        return measured_part(self.resolved, self.added_later)


# Sections that no group's YAML chooses.
OWN: dict[str, type] = {"": Options, "train": Train, "checkpoint": Checkpoint, "rehearsal": RehearsalKeys}
KEY_OF = {"train": "train.epochs=3", "checkpoint": "checkpoint.every=1", "rehearsal": "rehearsal.gpus=8"}


def resolve(composed: DictConfig) -> Config:
    """Build every group of a composed configuration; a wrong value is a UserError that names its key."""
    try:
        return build(cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)))
    except OmegaConfBaseException as error:
        raise UserError(first_line(error)) from error


def build(plain: dict[str, Any], make: Callable[[str, dict[str, Any]], Any] | None = None) -> Config:
    """A configuration from plain data. OmegaConfBaseException for a value of another type than its key's.

    make: how a section becomes an object, where that is not `section`
    """
    made = make or section
    sections = {name: _checked({"rehearsal": {}, **plain}, name) for name in (*SECTIONS, "rehearsal")}
    others = {key: value for key, value in plain.items() if key not in sections}
    for key in sorted(set(others) - {option.name for option in fields(Options)}):
        raise UserError(unknown_key(key, plain.keys() - {key}))
    settings = made("", others)
    built = {name: made(name, raw) for name, raw in sections.items()}
    for group in GROUPS:
        options.check(group, str(sections[group]["_target_"]), built[group])
    return Config(**built, **vars(settings))


def _checked(plain: dict[str, Any], name: str) -> dict[str, Any]:
    section = plain.get(name)
    if not isinstance(section, dict) or (name in GROUPS and "_target_" not in section):
        remedy = f"choose one with {name}=NAME" if name in GROUPS else f"give single keys, such as {KEY_OF[name]}"
        raise UserError(f"{name}={values.shown(section)} is no section of keys: {remedy} (see --help)")
    return cast(dict[str, Any], section)


def first_line(error: BaseException) -> str:
    """The first line that says something, with OmegaConf's key after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "").lstrip(".")
    text = lines[0] if lines else type(error).__name__
    return f"{key}: {text}" if key else text


def unknown_key(full_key: str, known: Collection[str]) -> str:
    """What to say of a key that does not exist. `known`: the keys beside it."""
    group, _, key = full_key.rpartition(".")
    known = sorted(set(known) - {"_target_", "hydra"})
    near = get_close_matches(key, known, 1)
    remedy = f"did you mean {f'{group}.' if group else ''}{near[0]}?" if near else ""
    there = f"the keys{f' of {group}' if group else ''} are {', '.join(known)}"
    return f"{values.shown(full_key)} does not exist: {remedy or there}"


def section(name: str, raw: dict[str, Any]) -> Any:
    """The object of a section, "" for the keys that belong to none: of the class that a group's `_target_` names, its
    fields filled from the other keys."""
    if name not in GROUPS:
        return _typed(OWN[name], raw, name)
    module, _, class_name = str(raw["_target_"]).rpartition(".")
    cls = getattr(importlib.import_module(module), class_name)
    return _typed(cls, {key: value for key, value in raw.items() if key != "_target_"}, name)


def _typed(cls: type, raw: dict[str, Any], group: str) -> Any:
    """The object, its values in the types of its fields: a `1` given for a float is 1.0."""
    keys = {key.name for key in fields(cls)}
    unknown = sorted(str(key) for key in set(raw) - keys)
    if unknown:
        raise UserError(unknown_key(f"{group}.{unknown[0]}" if group else unknown[0], keys))
    values.check(group, raw)
    schema = OmegaConf.create({group: OmegaConf.structured(cls)})  # under its group, so that an error names the key
    merged = cast(DictConfig, OmegaConf.merge(schema, {group: raw}))
    values.check(group, OmegaConf.to_container(merged[group]))  # once more: texts such as 'nan' have become numbers
    return OmegaConf.to_object(merged[group])
