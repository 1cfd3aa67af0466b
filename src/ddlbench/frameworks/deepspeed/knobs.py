"""DeepSpeed's knobs: what they may be, what they cannot do with a job, and the configuration that they make of it."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch.torch_version import TorchVersion

from ddlbench.checkpoint import OFF
from ddlbench.errors import Unavailable, UserError, added, check_values, importing, refuse
from ddlbench.frameworks.shared.groups import batch_norms
from ddlbench.frameworks.shared.refusals import check_alike, check_reduction, layerwise
from ddlbench.job import Job, on_meta

OLDEST = "0.19.8"  # before, ZeRO 1 and 2 with overlap_comm and torch.compile gave NaN (DeepSpeed#8061)
SCHEMES = ("autocast", "weights")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# torch's GradScaler grows after 2,000 good steps and shrinks at every overflow. DeepSpeed counts the steps after the
# first good one, and has grown after 2,000 with a window of 1,999 (if the next step does not overflow either, it grows
# again one step earlier than torch); its hysteresis of 2 would leave out another update.
AS_TORCH_SCALES = {"initial_scale_power": 16, "loss_scale_window": 1999, "hysteresis": 1}
BUCKET_MB = 25.0  # DDP's. DeepSpeed's own, 5e8 elements, takes 2 GB also for a small model


def import_deepspeed(device: torch.device) -> Any:
    """The module, quiet, working on this kind of device; Unavailable where it cannot be imported or is older than
    OLDEST."""
    remedy = "pip install 'ddlbench[deepspeed]'"
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # else it prints which one it finds
    with importing("deepspeed", remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses what its own dependencies deprecate
        import deepspeed

        # deepspeed.initialize imports it by way of torch.compile, and torch 2.11 warns of it.
        import_module("torch.utils.mkldnn")
    if TorchVersion(deepspeed.__version__) < OLDEST:
        raise Unavailable(f"deepspeed {deepspeed.__version__} is older than {OLDEST}: {remedy}")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that torch 2.14 changed, every step
    accelerator = import_module("deepspeed.accelerator")
    if accelerator.get_accelerator().device_name() != device.type:
        # It keeps the device of its first import in this process, which may have been for a rehearsal.
        of_device = import_module(f"deepspeed.accelerator.{device.type}_accelerator")
        accelerator.set_accelerator(getattr(of_device, f"{device.type.upper()}_Accelerator")())
    if device.type == "cpu":
        # Its shared-memory all-reduce serves inference only, and would be compiled at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@dataclass
class DeepSpeedOptions:
    """conf/framework/deepspeed.yaml says what each means."""

    library: ClassVar[str] = "deepspeed"

    name: str = "deepspeed"
    zero_stage: int = field(default=1, metadata={"defines": "deepspeed"})
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_to: str = added("cpu")
    nvme_path: str | None = added(None)
    cpu_adam: bool = added(False)
    mixed_precision: str = "autocast"
    reduce_bucket_mb: float | None = None
    gather_bucket_mb: float | None = None
    overlap_comm: bool | None = None
    persistence_threshold: int = 100_000

    def __post_init__(self) -> None:
        check_values(
            "framework.", self,
            above={"reduce_bucket_mb": 0, "gather_bucket_mb": 0}, least={"persistence_threshold": 0},
            choices={"zero_stage": range(4), "mixed_precision": SCHEMES, "offload_to": ("cpu", "nvme")},
        )  # fmt: skip
        needs = {"offload_optimizer": 1, "offload_parameters": 3, "mixed_precision": 1, "reduce_bucket_mb": 1,
                 "gather_bucket_mb": 1, "overlap_comm": 1}  # fmt: skip
        asked = {knob: value for knob in needs if (value := getattr(self, knob)) not in (None, False, "autocast")}
        offloads = self.offload_optimizer or self.offload_parameters
        wrong = {
            **{
                f"{knob}={value} needs framework.zero_stage={needs[knob]} or more, not {self.zero_stage}":
                    self.zero_stage < needs[knob]
                for knob, value in asked.items()
            },
            "offload_to=nvme needs framework.zero_stage=3, framework.offload_optimizer or offload_parameters, and "
            "framework.nvme_path, a folder on an NVMe disk of every node":
                self.offload_to == "nvme" and not (self.zero_stage == 3 and offloads and self.nvme_path),
            "nvme_path needs framework.offload_to=nvme": self.nvme_path is not None and self.offload_to != "nvme",
            "cpu_adam needs framework.offload_optimizer=true: it updates on the host":
                self.cpu_adam and not self.offload_optimizer,
        }  # fmt: skip
        if reason := next((reason for reason, holds in wrong.items() if holds), None):
            raise UserError(f"framework.{reason}")

    def casts(self, job: Job) -> bool:
        """Whether DeepSpeed itself casts the weights and keeps a copy in fp32, instead of autocast."""
        return self.mixed_precision == "weights" and job.precision != "fp32"

    def check(self, job: Job) -> None:
        self.supports(job)
        import_deepspeed(job.device)
        if self.cpu_adam:
            check_op(
                "CPUAdamBuilder", "framework.cpu_adam=true", "install g++ and ninja, which compile it at the first use"
            )
        if self.offload_to == "nvme":
            check_op("AsyncIOBuilder", "framework.offload_to=nvme", "install libaio with its headers (libaio-dev)")
            built = import_module("deepspeed.git_version_info").installed_ops.get("async_io")
            on_nvidia = job.device.type == "cuda" and torch.version.cuda is not None
            # Imported late: it asks for GPUs, and says so on a node that has CUDA's compiler and none.
            if on_nvidia and not built and import_module("torch.utils.cpp_extension").CUDA_HOME is None:
                raise Unavailable(
                    "framework.offload_to=nvme: DeepSpeed compiles its reader at the first use, and there is no CUDA "
                    "toolkit: load your site's CUDA module (nvcc), or set CUDA_HOME"
                )

    def check_checkpoint(self, job: Job) -> None:
        offload = next((name for name in ("offload_optimizer", "offload_parameters") if getattr(self, name)), None)
        reasons = {
            "framework.mixed_precision=weights keeps a second copy of the weights in DeepSpeed's optimizer: use "
            f"framework.mixed_precision=autocast, or {OFF}":
                self.casts(job),
            f"DeepSpeed's state of the loss scale is not saved: use train.precision=bf16, or {OFF}":
                job.precision == "fp16",
            f"buffers on the host are not saved: use framework.{offload}=false, or {OFF}": offload,
        }  # fmt: skip
        refuse(f"deepspeed: checkpoint.every with framework.zero_stage={self.zero_stage}", reasons)

    def supports(self, job: Job) -> None:
        """The refusals of `check` that do not depend on the installed library."""
        check_reduction("deepspeed", job)
        (optimizer, needs, others), casts, precision = layerwise(job), self.casts(job), job.precision
        here = f"with framework.zero_stage={self.zero_stage}"
        norms = batch_norms(on_meta(job))
        weights = "" if norms else " or framework.mixed_precision=weights"
        weights_in_fp16 = weights if job.device.type == "cuda" else ""
        reasons = {
            f"{optimizer} {here}: it needs {needs}, but ZeRO gives the optimizer flat shards: use "
            f"framework.zero_stage=0, or recipe.optimizer.name={others}":
                needs,
            f"train.precision=fp16 {here}: under autocast DeepSpeed does not lower the loss scale after an overflow, "
            f"and clips gradients before it unscales them: use bf16 or framework.zero_stage=0{weights_in_fp16}":
                precision == "fp16" and not casts,
            f"train.reduce_dtype={job.reduce_dtype} {here}: under autocast (train.precision={precision}) gradients are "
            f"reduced in the weights' type: use train.reduce_dtype=fp32{weights}":
                job.reduce_dtype != "fp32" != precision and not casts,
            f"train.precision=fp16 and framework.mixed_precision=weights {here}: DeepSpeed has no weights in fp16 on "
            "CPU: use bf16":
                casts and precision == "fp16" and job.device.type == "cpu",
            f"train.precision={precision} and framework.mixed_precision=weights {here}: BatchNorm's weights would be "
            "cast, its running statistics would not, and its kernels refuse mixed types: use "
            "framework.mixed_precision=autocast":
                casts and norms,
            f"train.compile {here}: hooks gather the parameters, and torch.compile breaks the graph at each hook: use "
            "framework.zero_stage=2":
                job.compile and self.zero_stage == 3,
            f"framework.cpu_adam=true with {optimizer}: it computes AdamW alone: use recipe.optimizer.name=adamw or "
            "framework.cpu_adam=false":
                self.cpu_adam and optimizer != "AdamW",
        }  # fmt: skip
        if self.zero_stage:
            refuse("deepspeed", reasons)
        check_alike(job, job.world_size, built=self.zero_stage < 3)  # which gathers weights within a block

    def config(self, job: Job) -> dict[str, Any]:
        """What deepspeed.initialize is given. What is not here keeps DeepSpeed's default."""
        count = job.micro_batches(job.world_size)
        on_host: dict[str, Any] = {"device": self.offload_to, "pin_memory": job.device.type == "cuda"}
        if self.offload_to == "nvme":
            on_host["nvme_path"] = self.nvme_path
        gather = "stage3_prefetch_bucket_size" if self.zero_stage == 3 else "allgather_bucket_size"
        zero = {
            "stage": self.zero_stage,
            "reduce_bucket_size": elements(self.reduce_bucket_mb or BUCKET_MB),
            "overlap_comm": self.overlaps(job),
            **({"compute_grad_norm": False} if self.zero_stage < 3 and not self.needs_norm(job) else {}),
            "stage3_param_persistence_threshold": self.persistence_threshold,
            **({gather: elements(self.gather_bucket_mb)} if self.gather_bucket_mb else {}),
            **({"offload_optimizer": on_host} if self.offload_optimizer else {}),
            **({"offload_param": on_host} if self.offload_parameters else {}),
        }
        precision: dict[str, Any] = {}
        if self.casts(job):
            precision = {job.precision: {"enabled": True, **(AS_TORCH_SCALES if job.precision == "fp16" else {})}}
        elif job.precision != "fp32":
            no_modules: list[str] = []  # whose gradients would travel in that type
            autocast = {"enabled": True, "dtype": DTYPES[job.precision], "lower_precision_safe_modules": no_modules}
            precision = {"torch_autocast": autocast}
        return {
            "train_micro_batch_size_per_gpu": job.replica_batch(job.world_size) // count,
            "gradient_accumulation_steps": count,
            "gradient_clipping": job.clip_norm or 0.0,  # its default is 1
            "communication_data_type": job.reduce_dtype,
            **precision,
            "zero_optimization": zero if self.zero_stage else {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": sys.maxsize,
            "timers": {"throughput": {"enabled": False}},  # they wait for the device twice a step
        }

    def overlaps(self, job: Job) -> bool:
        """By default where it can save time: DeepSpeed itself overlaps at stage 3 only."""
        if self.overlap_comm is not None:
            return self.overlap_comm
        return self.zero_stage == 3 or (self.zero_stage > 0 and job.device.type == "cuda")

    def needs_norm(self, job: Job) -> bool:
        """Whether the gradient's norm is computed at every update. Where nothing clips, it only costs an all-reduce and
        a wait for the device, but DeepSpeed cannot do without it when the optimizer's state is offloaded, or when at
        stage 1 its weights are in bf16."""
        if not self.zero_stage or job.clip_norm is not None:
            return job.clip_norm is not None
        in_bf16 = self.casts(job) and self.zero_stage == 1 and job.precision == "bf16"
        return self.offload_optimizer or in_bf16


def check_op(builder: str, key: str, remedy: str) -> None:
    """Unavailable if DeepSpeed cannot compile or load one of its operations on this machine."""
    made = getattr(import_module("deepspeed.ops.op_builder"), builder)()
    if not made.is_compatible():
        raise Unavailable(f"{key}: DeepSpeed's {made.name} does not work on this machine: {remedy}")


def elements(mebibytes: float) -> int:
    """How many numbers of 4 bytes: an even number, because the library insists on one."""
    return max(1, int(mebibytes * 2**20 / 8)) * 2
