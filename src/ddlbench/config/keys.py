"""The keys of conf/config.yaml, which says what each means; which values a key may have; and which keys change what is
measured: `run_id` is the hash of these, reports merge and compare by them.

A field that a later version adds is declared with the value that keeps the earlier behavior, so that new records are
repeats of old ones that lack it: `added(None)`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from ddlbench import offloading, recomputation
from ddlbench.errors import ADDED, UserError, added, check_values
from ddlbench.ranks.launchers import SHARED_GPU
from ddlbench.texts import printable, shortened

MODES = ("train", "loader", "rehearsal")
PRECISIONS = ("fp32", "bf16", "fp16")
POSITIVE = (
    "epochs", "steps", "global_batch", "batch_per_gpu", "micro_batch", "clip_norm", "threads_per_rank", "timeout_s",
    "time_limit_s", "flops_per_host_byte",
)  # fmt: skip
BATCH_PER_GPU = 32  # where no batch is given
DEVICES = ("cpu", "cuda")
# Every library takes numbers below 2**31.
LARGEST_INTEGER = 2**31 - 1
LONGEST_TEXT = 3000  # a path has 4,096 bytes on Linux, and a run's folder comes below it
LONGEST_NAME = 60  # bytes: a file name has 255, and a run's folder joins three names
LONGEST_LIST = 1000
# Sizes whose products still fit into 64 bits, and counts of layers that a dry run builds within seconds.
LARGEST_SIZE = 2**20
LARGEST = {
    "model.n_layer": 1000,
    "model.layers": 1000,
    "model.convs": 1000,
    "model.image_size": 2**14,
    "data.vocab_size": LARGEST_SIZE,
    "loader.prefetch": 1000,  # batches in memory
    "train.timeout_s": 1_000_000,  # 11 days; sockets count milliseconds in 32 bits
}
MAY_BE_EMPTY = "cluster.notes"
STAGE_TO = "data.stage_to"  # its ~ is replaced on the node that copies
# Files and folders, which depend on the machine.
PATHS = (
    "results_dir", "checkpoint.dir", "data.root", "data.cache_dir", STAGE_TO, "data.tokenizer", "data.train",
    "data.valid", "data.train_dir", "data.val_dir", "framework.nvme_path",
)  # fmt: skip
# Keys that say where a run happens or how it is shown, not what it measures. The data are covered by their hash.
UNMEASURED = (
    "results_dir", "dryrun", "progress", "train.timeout_s", "train.time_limit_s",
    "profile", "profile_steps", "profile_trace",  # a window after all that is measured (docs/adr/0016)
    "preflight", "preflight_warn", "preflight_stop",  # a check before it (run/preflight.py)
    "data.root", "data.cache_dir", "data.tokenizer", "data.train", "data.valid", "cluster.notes",
    "checkpoint.dir", "checkpoint.keep", "checkpoint.resume",
)  # fmt: skip

Plain = Mapping[str, Any]


@dataclass
class Train:
    """`train.`: the same words for every framework."""

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
    checkpoint_activations: Any = False  # recomputation.Choice
    offload_activations: Any = added(False)  # the same
    flops_per_host_byte: float = added(10_000.0)
    compile: bool = False
    channels_last: bool = False
    seed: int = 0
    repeat: int = 0
    threads_per_rank: int = 1
    validate: bool = True
    timeout_s: float = 600.0
    deterministic: bool = added(False)
    cold_cache: bool = added(False)
    time_limit_s: float | None = added(None)

    def __post_init__(self) -> None:
        self.checkpoint_activations = recomputation.choice(self.checkpoint_activations)
        self.offload_activations = offloading.choice(self.offload_activations)
        offloading.check(self.checkpoint_activations, self.offload_activations)
        check_values(
            "train.", self,
            above=dict.fromkeys(POSITIVE, 0),
            least={"warmup_steps": 0, "seed": 0, "repeat": 0},
            choices={"precision": PRECISIONS, "reduce_dtype": PRECISIONS},
        )  # fmt: skip
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

    def samples_per_update(self, world_size: int) -> int:
        """The global batch. `batch_per_gpu` counts every device, whatever the layout."""
        if self.global_batch is not None:
            return self.global_batch
        return (self.batch_per_gpu or BATCH_PER_GPU) * world_size

    def samples_per_micro_batch(self) -> int:
        """Samples of one forward pass of a single device."""
        return self.micro_batch or self.samples_per_update(1)


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
    backend: str | None = added(None)
    preflight: bool = False
    preflight_warn: float = 1.5
    preflight_stop: float | None = 4.0

    def __post_init__(self) -> None:
        check_values(
            "", self,
            above={"profile_steps": 0, "preflight_warn": 1, "preflight_stop": 1},
            choices={"mode": MODES, "backend": (SHARED_GPU,)},
        )  # fmt: skip
        if self.profile and self.mode != "train":
            raise UserError(f"profile=true needs a model to train, mode={self.mode} has none: choose mode=train")
        if self.profile_trace and not self.profile:
            raise UserError("profile_trace=true keeps the trace of a profiled window: set profile=true too")


@dataclass
class Checkpoint:
    """`checkpoint.`: when a run saves what it needs to continue, and where."""

    every: int | None = added(None)
    dir: str | None = added(None)
    keep: int = added(2)
    resume: bool | None = added(None)

    def __post_init__(self) -> None:
        check_values("checkpoint.", self, least={"every": 1, "keep": 1})
        if self.resume and self.every is None:
            raise UserError("checkpoint.resume=true continues a run that saves: set checkpoint.every=1, say, too")

    @property
    def folder(self) -> Path | None:
        """`dir`, its variables expanded on this node. UserError for one that is not set."""
        if self.dir is None:
            return None
        if "$" in (expanded := os.path.expandvars(self.dir)):
            raise UserError(f"checkpoint.dir={self.dir} is {expanded!r} on this node: set the variable, or give a path")
        return Path(expanded)

    def resumes(self, env: Mapping[str, str]) -> bool:
        """Whether to begin where an earlier attempt saved: as `resume` says; if it is None, in a requeued Slurm job."""
        restarted = env.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        return self.every is not None and (restarted if self.resume is None else self.resume)


@dataclass
class RehearsalKeys:
    """`rehearsal.`: the rank and the job of mode=rehearsal."""

    gpus: int = 1
    device: str = "cpu"
    rank: int = 0
    gpus_per_node: int = 8
    json: bool = False
    trace: str | None = None

    def __post_init__(self) -> None:
        ranks = {"rank": (0 <= self.rank < self.gpus, f"a number from 0 to {self.gpus - 1}")}
        sizes = {"gpus": 1, "gpus_per_node": 1}
        check_values("rehearsal.", self, least=sizes, choices={"device": DEVICES}, rules=ranks)


def check_value(key: str, value: Any) -> None:
    """Raise UserError for a value that no key may have. `value`: plain data below `key` ("" for the top level)."""
    if isinstance(value, Mapping):
        for name, item in cast(Mapping[str, Any], value).items():
            check_value(f"{key}.{name}" if key else name, item)
    elif isinstance(value, list):
        items = cast(list[Any], value)
        if len(items) > LONGEST_LIST:
            raise UserError(f"{key} has {len(items)} entries: give at most {LONGEST_LIST}")
        for item in items:
            check_value(key, item)
    elif isinstance(value, str):
        name = key.rpartition(".")[2] == "name"
        size, longest = len(value.encode(errors="replace")), LONGEST_NAME if name else LONGEST_TEXT
        if not value.strip() and key != MAY_BE_EMPTY:
            raise UserError(f"{key}= is empty: give a value, null where the key may have none, or leave the key out")
        if size > longest:
            raise UserError(f"{key} has {size} bytes: give at most {longest}")
        if not value.isprintable():
            raise UserError(f"{key}={shown(value)} holds a control character: leave it out")
        if name and ("/" in value or ".." in value):
            raise UserError(f"{key}={value} names folders and rows of tables: it cannot hold / or ..")
        if value.startswith("~") and key != STAGE_TO:
            raise UserError(f"{key}={value}: ~ is not replaced here: write $HOME instead of ~")
    elif isinstance(value, int | float):  # True and False too, which are always small enough
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value} is not a finite number: give a number, or null where the key may have none")
        default = LARGEST_SIZE if key.startswith("model.") else LARGEST_INTEGER
        largest = LARGEST.get(key, default if isinstance(value, int) else math.inf)
        if abs(value) > largest:
            raise UserError(f"{key}={shown(value)} is too large: give at most {largest}")


def shown(value: object, longest: int = 60) -> str:
    """A value as one short line of printable characters."""
    text = hex(value) if isinstance(value, int) and abs(value) > 2**64 else str(value)  # str() refuses huge integers
    return shortened(printable(text), longest)


def written(value: object) -> str:
    """A value as on a command line and in YAML."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def added_later(config: object, prefix: str = "") -> dict[str, Any]:
    """The dotted keys of a dataclass or its object that a later version added, with the value of earlier behavior."""
    later: dict[str, Any] = {}
    keys: tuple[Field[Any], ...] = fields(cast(Any, config))
    for key in keys:
        if ADDED in key.metadata:
            later[prefix + key.name] = key.default
        elif is_dataclass(part := getattr(config, key.name, None)):
            later |= added_later(part, f"{prefix}{key.name}.")
    return later


def measured_part(plain: Plain, before: Plain, prefix: str = "") -> dict[str, Any]:
    """A configuration without the keys that do not change a measurement, and without the paths of modules that older
    records have. Whether data were staged changes a measurement; the folder does not.

    before: the keys that were added later, with the value at which they are left out. The configuration of a record may
        lack any of its keys
    prefix: the section whose keys these are, with a dot; "": the complete configuration
    """
    measured: dict[str, Any] = {}
    for key, value in plain.items():
        name = prefix + key
        if key == "_target_" or (name in before and before[name] == value):
            continue
        if name == STAGE_TO:
            measured["staged"] = value is not None
        elif name not in UNMEASURED:
            section = isinstance(value, Mapping)
            measured[key] = measured_part(cast(Plain, value), before, f"{name}.") if section else value
    if prefix:
        return measured
    return {key: value for key, value in measured.items() if value != {}}  # a section of keys that were all added later
