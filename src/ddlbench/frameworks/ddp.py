"""torch.nn.parallel.DistributedDataParallel: a replica a rank, gradients all-reduced in buckets during backward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.shared.batchnorm import Statistics
from ddlbench.frameworks.shared.common import (
    Update,
    accumulate,
    check_alike,
    checkpoint_blocks,
    drop,
    evaluate,
    whole_state,
)
from ddlbench.job import Batch, Job, Place

# BatchNorm's statistics are averaged before validation, not sent at every step. torch 2.14 renamed the switch.
RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if RENAMED else "broadcast_buffers": False}

HOOKS = ("none", "fp16", "bf16", "powersgd")


@dataclass
class DDP:
    """The knobs of DistributedDataParallel; conf/framework/ddp.yaml says what each means."""

    name: str = "ddp"
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: str = "none"
    powersgd_rank: int = 1
    powersgd_start_step: int = 10

    def __post_init__(self) -> None:
        if self.comm_hook not in HOOKS:
            raise UserError(f"framework.comm_hook={self.comm_hook} is unknown: choose one of {', '.join(HOOKS)}")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise UserError(f"framework.bucket_cap_mb={self.bucket_cap_mb} must be greater than 0 MiB, or null")
        if self.powersgd_rank < 1 or self.powersgd_start_step < 2:
            raise UserError(
                f"framework.powersgd_rank={self.powersgd_rank} must be at least 1 and "
                f"framework.powersgd_start_step={self.powersgd_start_step} at least 2 (its errors feed back)"
            )

    def check(self, job: Job) -> None:
        hook = self._hook(job)
        if hook == "bf16" and job.device.type != "cuda":
            raise Unsupported("ddp: gradients in bf16 need NCCL (gloo cannot sum them): use fp16 or fp32 on CPU")
        if self.static_graph and job.micro_batches(job.world_size) > 1:
            raise Unsupported(
                f"ddp: static_graph does not go with {job.micro_batches(job.world_size)} micro batches an update "
                "(torch's reducer counts each backward): set framework.static_graph=false"
            )
        if hook == "powersgd" and job.precision == "fp16":
            raise Unsupported(
                "ddp: PowerSGD feeds the error of an overflowed fp16 gradient back for ever: use bf16 or comm_hook=fp16"
            )
        check_alike(job, job.world_size)

    def _hook(self, job: Job) -> str:
        """`train.reduce_dtype` means the same for every framework; here a hook does it."""
        if job.reduce_dtype == "fp32" or job.reduce_dtype == self.comm_hook:
            return self.comm_hook
        if self.comm_hook != "none":
            raise UserError(
                f"train.reduce_dtype={job.reduce_dtype} and framework.comm_hook={self.comm_hook} contradict: "
                "give one of them"
            )
        return job.reduce_dtype

    def setup(self, job: Job) -> Place:
        self.job = job
        model = job.build()
        if job.checkpoint_activations:
            checkpoint_blocks(model)
        self.model = DistributedDataParallel(
            model,
            **NO_BUFFER_SYNC,
            init_sync=False,  # every rank builds the same weights from the seed
            bucket_cap_mb=self.bucket_cap_mb,  # only for None torch keeps its small first bucket
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        self._register_hook()
        if job.compile:
            self.model.compile()
        self.optimizer = job.optimizer(self.model.module.named_parameters())
        self.update = Update(self.optimizer, job)
        self.count = job.micro_batches(job.world_size)
        self.statistics = Statistics(self.model, dist.group.WORLD)
        return Place(job.rank, job.world_size, coordinates={"dp": job.rank})

    def _register_hook(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        match self._hook(self.job):
            case "fp16":
                self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
            case "bf16":
                self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
            case "powersgd":
                state = powerSGD_hook.PowerSGDState(
                    process_group=None,
                    matrix_approximation_rank=self.powersgd_rank,
                    start_powerSGD_iter=self.powersgd_start_step,
                )
                self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            case _:
                pass  # DDP's own all-reduce, in the gradients' type

    @property
    def updates(self) -> int:
        return self.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        loss = accumulate(self.model, batch, self.job, self.count, self.update, self.model.no_sync)
        self.update.apply(self.model.parameters())
        self.statistics.moved()
        return loss

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        self.statistics.settle()
        return evaluate(self.model, self.model, batch, self.job, self.count)

    def flush(self) -> None:
        """Nothing is in flight between steps."""

    def state(self) -> dict[str, Tensor] | None:
        self.statistics.settle()
        return whole_state(self.model.module) if dist.get_rank() == 0 else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.module.load_state_dict(state)

    def facts(self) -> dict[str, Any]:
        hook = self._hook(self.job)
        return {
            "staleness": 0,
            "bucket_cap_mb": self.bucket_cap_mb,
            "bucket_rule": bucket_rule(self.bucket_cap_mb),
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "comm_hook": hook,
            "reduce_dtype": hook if hook in ("fp16", "bf16") else "fp32",
        }

    def close(self) -> None:
        drop(self, "statistics", "model", "optimizer", "update")


def bucket_rule(cap_mb: float | None) -> str:
    """How large the all-reduces are. The first bucket holds the last layers, whose gradients are ready first."""
    if cap_mb is None:
        return "torch's own: 1 MiB first, then 25 MiB"
    return f"{cap_mb:g} MiB, the first one too"
