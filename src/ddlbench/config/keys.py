"""The keys of conf/config.yaml, which says what each means, and which values each may have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddlbench.errors import UserError
from ddlbench.ranks.launchers import SHARED_GPU

MODES = ("train", "loader", "rehearsal")
PRECISIONS = ("fp32", "bf16", "fp16")
POSITIVE = (
    "epochs", "steps", "global_batch", "batch_per_gpu", "micro_batch", "threads_per_rank", "timeout_s",
    "time_limit_s",
)  # fmt: skip
BATCH_PER_GPU = 32  # where no batch is given
DEVICES = ("cpu", "cuda")


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


@dataclass
class Checkpoint:
    """`checkpoint.`: when a run saves what it needs to continue, and where."""

    every: int | None = field(default=None, metadata={"before": None})
    dir: str | None = field(default=None, metadata={"before": None})
    keep: int = field(default=2, metadata={"before": 2})
    resume: bool | None = field(default=None, metadata={"before": None})

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{name}={value} must be 1 or more")
        if self.resume and self.every is None:
            raise UserError("checkpoint.resume=true continues a run that saves: set checkpoint.every=1, say, too")

    @property
    def folder(self) -> Path | None:
        """`dir`, its variables and ~ expanded on this node."""
        return None if self.dir is None else Path(os.path.expandvars(self.dir)).expanduser()

    def resumes(self, env: Mapping[str, str]) -> bool:
        """Whether to begin where an earlier attempt saved; where it is not said, if Slurm has requeued the job."""
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
        for name in ("gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise UserError(f"rehearsal.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.rank < self.gpus:
            raise UserError(f"rehearsal.rank={self.rank} must be a number from 0 to {self.gpus - 1}")
        if self.device not in DEVICES:
            raise UserError(f"rehearsal.device={self.device} must be {' or '.join(DEVICES)}")
