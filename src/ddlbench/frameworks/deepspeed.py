"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): replicas that share out optimizer state, gradients and parameters.

Stage 0 shares nothing out, stage 1 the optimizer state, stage 2 the gradients too, stage 3 the parameters too. The
library's engine owns backward and step; torch's optimizer is the one that everybody has.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from ddlbench.errors import Unavailable, Unsupported, UserError
from ddlbench.frameworks.common import (
    average_statistics,
    checkpoint_blocks,
    evaluate,
    micro_batches,
    whole_state,
)
from ddlbench.job import Batch, Job, Place
from ddlbench.launch import detect

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
BUCKET_MB = 25.0  # DDP's. DeepSpeed's own, 5e8 elements, takes 2 GB whatever the size of the model
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def library(device: torch.device) -> Any:
    """The module, quiet; Unavailable where it cannot be imported."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # else it says aloud what it finds
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses what its own dependencies deprecate
            import deepspeed
    except Exception as error:  # its import also looks for compilers and CUDA toolkits, and fails in many ways
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise Unavailable(f"deepspeed: {reason}: pip install 'ddlbench[deepspeed]'") from error
    # Its shared-memory all-reduce serves inference on CPUs only, and would be compiled at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@dataclass
class DeepSpeed:
    """The knobs of ZeRO; conf/framework/deepspeed.yaml says what each means."""

    name: str = "deepspeed"
    zero_stage: int = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False
    reduce_bucket_mb: float | None = None
    overlap_comm: bool | None = None
    persistence_threshold: int = 100_000

    def __post_init__(self) -> None:
        if self.zero_stage not in range(4):
            raise UserError(f"framework.zero_stage={self.zero_stage} is unknown: choose 0, 1, 2 or 3")
        if self.reduce_bucket_mb is not None and self.reduce_bucket_mb <= 0:
            raise UserError(f"framework.reduce_bucket_mb={self.reduce_bucket_mb} must be greater than 0 MiB, or null")
        if self.persistence_threshold < 0:
            raise UserError(f"framework.persistence_threshold={self.persistence_threshold} must not be negative")
        needs = {"offload_optimizer": 1, "offload_parameters": 3, "reduce_bucket_mb": 1, "overlap_comm": 1}
        for knob, stage in needs.items():
            if getattr(self, knob) and self.zero_stage < stage:
                raise UserError(
                    f"framework.{knob}={getattr(self, knob)} needs framework.zero_stage={stage} or more, "
                    f"not {self.zero_stage}"
                )

    def check(self, job: Job) -> None:
        job.micro_batches(job.world_size)
        if job.reduce_dtype == "bf16" and job.device.type != "cuda":
            raise Unsupported("deepspeed: gradients in bf16 need NCCL (gloo cannot sum them): use fp16 or fp32 on CPU")
        if self.zero_stage:
            self._check_shards(job)
        library(job.device)

    def _check_shards(self, job: Job) -> None:
        optimizer = type(job.optimizer([("weight", nn.Parameter(torch.zeros(2, 2)))]))
        refusals = [
            (optimizer not in ELEMENTWISE, optimizer.__name__, "layer-wise norms need whole tensors, and ZeRO hands "
             "the optimizer flat shards: use framework.zero_stage=0, or SGD, Adam or AdamW"),
            (job.precision == "fp16", "train.precision=fp16", "under autocast each rank would look for overflows in "
             "its own shard only: use train.precision=bf16 or framework.zero_stage=0"),
            (job.reduce_dtype != "fp32" != job.precision, f"train.reduce_dtype={job.reduce_dtype}", "under autocast "
             f"(train.precision={job.precision}) gradients travel in the weights' type: use train.reduce_dtype=fp32"),
            (job.compile and self.zero_stage == 3, "train.compile", "hooks gather the parameters, and a compiled model "
             "breaks at each: use framework.zero_stage=2"),
        ]  # fmt: skip
        for asked, what, reason in refusals:
            if asked:
                raise Unsupported(f"deepspeed: {what} with framework.zero_stage={self.zero_stage}: {reason}")

    def setup(self, job: Job) -> Place:
        deepspeed = library(job.device)
        self.job, self.count = job, job.micro_batches(job.world_size)
        model = job.build()
        if job.checkpoint_activations:
            checkpoint_blocks(model)
        os.environ.setdefault("LOCAL_RANK", str(detect().local_rank))  # the engine asks for it
        self.engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=job.device.index or 0),
            model=model,
            optimizer=job.optimizer(model.named_parameters()),
            config=self.config(job),
            dist_init_required=False,
        )
        self._limit_waiting()
        if job.compile:
            self.engine.compile()
        self.optimizer = self.engine.basic_optimizer
        self.applied = 0
        self.optimizer.register_step_post_hook(self._made)
        self.settled = True
        return Place(job.rank, job.world_size, coordinates={"dp": job.rank})

    def _limit_waiting(self) -> None:
        """The engine reduces in a group of its own, made with torch's default timeout."""
        if hasattr(dist, "set_timeout"):  # new in torch 2.14
            dist.set_timeout(timedelta(seconds=self.job.timeout_s), self.engine.data_parallel_group)

    def config(self, job: Job) -> dict[str, Any]:
        """What deepspeed.initialize is given. What is not here keeps DeepSpeed's default."""
        return {
            "train_micro_batch_size_per_gpu": job.replica_batch(job.world_size) // job.micro_batches(job.world_size),
            "gradient_accumulation_steps": job.micro_batches(job.world_size),
            "gradient_clipping": job.clip_norm or 0.0,  # its default is 1
            "communication_data_type": job.reduce_dtype,
            "torch_autocast": {
                "enabled": job.precision in DTYPES,
                "dtype": DTYPES.get(job.precision, "bfloat16"),
                "lower_precision_safe_modules": [],  # those whose gradients would travel in that type
            },
            "zero_optimization": self._zero(job.device),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": sys.maxsize,
            "timers": {"throughput": {"enabled": False}},  # they wait for the device twice a step
        }

    def _zero(self, device: torch.device) -> dict[str, Any]:
        if not self.zero_stage:
            return {"stage": 0}
        where = {"device": "cpu", "pin_memory": device.type == "cuda"}
        return {
            "stage": self.zero_stage,
            "reduce_bucket_size": int((self.reduce_bucket_mb or BUCKET_MB) * 2**20 / 4),
            "overlap_comm": self.overlap_comm,
            "stage3_param_persistence_threshold": self.persistence_threshold,
            **({"offload_optimizer": where} if self.offload_optimizer else {}),
            **({"offload_param": where} if self.offload_parameters else {}),
        }

    @property
    def updates(self) -> int:
        if self.zero_stage:
            return self.engine.global_steps - self.engine.skipped_steps
        return self.applied  # at stage 0 a loss scaler of torch's decides, unseen by the engine

    def _made(self, *_: object) -> None:
        self.applied += 1

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        total = torch.zeros((), device=self.job.device)
        for micro in micro_batches(batch, self.count):
            with record_function("ddlbench/forward"):  # under the engine's own autocast
                loss = self.job.loss(self.engine(micro.inputs), micro.targets)
            with record_function("ddlbench/backward"):
                self.engine.backward(loss)  # which divides by the number of micro batches
            with record_function("ddlbench/update"):
                self.engine.step()  # counts the micro batches, updates after the last
            total += loss.detach() / self.count
        self.settled = False
        return total

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        self._settle()
        return evaluate(self.engine.module, self.engine.module, batch, self.job, self.count)

    def _settle(self) -> None:
        if not self.settled:
            average_statistics(self.engine.module)
            self.settled = True

    def flush(self) -> None:
        """Nothing is in flight between steps."""

    def _blocks(self, modifier_rank: int | None = None) -> Iterator[tuple[str, nn.Module]]:
        """Every named block, whole while it is looked at: at stage 3 no rank need hold the whole model.
        modifier_rank: whose changes to it count."""
        for name, block in self.engine.module.named_children():
            with self._gathered(block, modifier_rank):
                yield name, block

    def _gathered(self, block: nn.Module, modifier_rank: int | None) -> AbstractContextManager[None]:
        if self.zero_stage < 3:
            return nullcontext()
        return library(self.job.device).zero.GatheredParameters(list(block.parameters()), modifier_rank=modifier_rank)

    def state(self) -> dict[str, Tensor] | None:
        self._settle()
        whole: dict[str, Tensor] = {}
        for name, block in self._blocks():
            if self.job.rank == 0:
                whole |= {f"{name}.{key}": tensor for key, tensor in whole_state(block).items()}
        return whole if self.job.rank == 0 else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, block in self._blocks(modifier_rank=0):
            prefix = f"{name}."
            block.load_state_dict({key[len(prefix) :]: state[key] for key in state if key.startswith(prefix)})
        if self.zero_stage:  # the optimizer has its own copy of what it updates
            self.engine.optimizer.refresh_fp32_params()

    def facts(self) -> dict[str, Any]:
        zero = self.engine.config["zero_optimization"]
        return {
            "staleness": 0,
            "zero_stage": self.zero_stage,
            "offload_optimizer": self.offload_optimizer,
            "offload_parameters": self.offload_parameters,
            "reduce_bucket_elements": zero.get("reduce_bucket_size"),
            "overlap_comm": bool(self.zero_stage and self.engine.zero_overlap_comm()),
            "persistence_threshold": self.persistence_threshold if self.zero_stage == 3 else None,
            "precision_scheme": "torch_autocast" if self.job.precision in DTYPES else "fp32",
            "reduce_dtype": self.job.reduce_dtype,
        }

    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.optimizer
