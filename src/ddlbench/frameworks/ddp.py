"""torch.nn.parallel.DistributedDataParallel: a replica a rank, gradients all-reduced in buckets during backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ddlbench.checkpoint.live import OFF
from ddlbench.errors import UserError, check_values, refuse
from ddlbench.frameworks.shared.refusals import check_alike, check_reduction
from ddlbench.frameworks.shared.replica import Replica, build, in_ddp
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
        hook = self.hook(job)
        check_reduction("ddp", job, hook)
        count = job.micro_batches(job.world_size)
        reasons = {
            f"static_graph does not support {count} micro batches per update (torch's reducer counts each backward "
            "pass): set framework.static_graph=false":
                self.static_graph and count > 1,
            "PowerSGD's error feedback never recovers from an overflow in fp16: use bf16 or comm_hook=fp16":
                hook == "powersgd" and job.precision == "fp16",
        }  # fmt: skip
        refuse("ddp", reasons)
        check_alike(job, job.world_size)

    def hook(self, job: Job) -> str:
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
        reason = "PowerSGD keeps the errors of its own approximation, which are not saved: set framework.comm_hook=none"
        refuse("ddp", {f"{reason}, or {OFF}": self.hook(job) == "powersgd"})

    def setup(self, job: Job) -> Replica:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        model, hook = build(job), self.hook(job)
        wrapped = in_ddp(
            model,
            hook,
            bucket_cap_mb=self.bucket_cap_mb,  # only for None torch keeps its small first bucket
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        if hook == "powersgd":
            state = PowerSGDState(None, self.powersgd_rank, self.powersgd_start_step)
            wrapped.register_comm_hook(state, powerSGD_hook)
        optimizer = job.optimizer(model.named_parameters())
        return Replica(
            job, model, optimizer, self._facts(job),
            trained=wrapped, no_sync=wrapped.no_sync, dp_group=dist.group.WORLD,
        )  # fmt: skip

    def _facts(self, job: Job) -> dict[str, Any]:
        hook = self.hook(job)
        rule = "torch's own: 1 MiB first, then 25 MiB"  # the first bucket holds the last layers, which are ready first
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "bucket_rule": rule if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g} MiB, the first one too",
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "comm_hook": hook,
            "reduce_dtype": hook if hook in ("fp16", "bf16") else "fp32",
        }
