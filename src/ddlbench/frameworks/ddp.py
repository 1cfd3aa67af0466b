"""torch.nn.parallel.DistributedDataParallel: a replica a rank, gradients all-reduced in buckets during backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddlbench.checkpoint.live import OFF
from ddlbench.errors import Unsupported, UserError, check_values
from ddlbench.frameworks.shared.batchnorm import NO_BUFFER_SYNC
from ddlbench.frameworks.shared.refusals import check_alike, check_reduction
from ddlbench.frameworks.shared.replica import Replica, build
from ddlbench.job import Job

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
        numbers = {"powersgd_rank": 1, "powersgd_start_step": 2}  # its errors feed back
        check_values("framework.", self, above={"bucket_cap_mb": 0}, least=numbers, choices={"comm_hook": HOOKS})

    def check(self, job: Job) -> None:
        hook = self._hook(job)
        check_reduction("ddp", job, hook)
        if self.static_graph and job.micro_batches(job.world_size) > 1:
            raise Unsupported(
                f"ddp: static_graph does not support {job.micro_batches(job.world_size)} micro batches per update "
                "(torch's reducer counts each backward pass): set framework.static_graph=false"
            )
        if hook == "powersgd" and job.precision == "fp16":
            raise Unsupported(
                "ddp: PowerSGD's error feedback never recovers from an overflow in fp16: use bf16 or comm_hook=fp16"
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

    def check_checkpoint(self, job: Job) -> None:
        if self._hook(job) == "powersgd":
            raise Unsupported(
                "ddp: PowerSGD keeps the errors of its own approximation, which are not saved: "
                f"set framework.comm_hook=none, or {OFF}"
            )

    def setup(self, job: Job) -> Replica:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        model = build(job)
        wrapped = DistributedDataParallel(
            model,
            **NO_BUFFER_SYNC,
            init_sync=False,  # every rank builds the same weights from the seed
            bucket_cap_mb=self.bucket_cap_mb,  # only for None torch keeps its small first bucket
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        match self._hook(job):
            case "fp16":
                wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
            case "bf16":
                wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
            case "powersgd":
                ranks, start = self.powersgd_rank, self.powersgd_start_step
                wrapped.register_comm_hook(PowerSGDState(None, ranks, start), powerSGD_hook)
            case _:
                pass  # DDP's own all-reduce, in the gradients' type
        optimizer = job.optimizer(model.named_parameters())
        return Replica(
            job, model, optimizer, self._facts(job),
            trained=wrapped, no_sync=wrapped.no_sync, dp_group=dist.group.WORLD,
        )  # fmt: skip

    def _facts(self, job: Job) -> dict[str, Any]:
        hook = self._hook(job)
        rule = "torch's own: 1 MiB first, then 25 MiB"  # the first bucket holds the last layers, which are ready first
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "bucket_rule": rule if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g} MiB, the first one too",
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "comm_hook": hook,
            "reduce_dtype": hook if hook in ("fp16", "bf16") else "fp32",
        }
