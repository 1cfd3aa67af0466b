"""The keys of conf/config.yaml, which says what each means, and which values each may have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddlbench import offloading, recomputation
from ddlbench.errors import UserError, check_values
from ddlbench.ranks.launchers import SHARED_GPU

MODES = ("train", "loader", "rehearsal")
PRECISIONS = ("fp32", "bf16", "fp16")
POSITIVE = (
    "epochs", "steps", "global_batch", "batch_per_gpu", "micro_batch", "clip_norm", "threads_per_rank", "timeout_s",
    "time_limit_s", "flops_per_host_byte",
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
    checkpoint_activations: Any = False  # recomputation.Choice
    offload_activations: Any = field(default=False, metadata={"before": False})  # the same
    flops_per_host_byte: float = field(default=10_000.0, metadata={"before": 10_000.0})
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
    backend: str | None = field(default=None, metadata={"before": None})
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

    every: int | None = field(default=None, metadata={"before": None})
    dir: str | None = field(default=None, metadata={"before": None})
    keep: int = field(default=2, metadata={"before": 2})
    resume: bool | None = field(default=None, metadata={"before": None})

    def __post_init__(self) -> None:
        check_values("checkpoint.", self, least={"every": 1, "keep": 1})
        if self.resume and self.every is None:
            raise UserError("checkpoint.resume=true continues a run that saves: set checkpoint.every=1, say, too")

    @property
    def folder(self) -> Path | None:
        """`dir`, its variables expanded on this node."""
        return None if self.dir is None else Path(os.path.expandvars(self.dir))

    def resumes(self, env: Mapping[str, str]) -> bool:
        """Whether to begin where an earlier attempt saved: as `resume` says; None: if Slurm has requeued the job."""
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
