"""torch.nn.parallel.DistributedDataParallel: a replica a rank, gradients all-reduced in buckets during backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddlbench.checkpoint import OFF
from ddlbench.errors import UserError, added, check_values, refuse
from ddlbench.frameworks.compression import ErrorFeedback, Int8, PowerSGD, Sign, TopK
from ddlbench.frameworks.shared.groups import all_ranks
from ddlbench.frameworks.shared.refusals import check_alike, check_reduction
from ddlbench.frameworks.shared.replica import Replica, Update, build, in_ddp
from ddlbench.job import Job
from ddlbench.measure.marks import NOTHING_SENT

COMPRESSED = ("powersgd", "topk", "sign", "int8")  # with error feedback
HOOKS = ("none", "fp16", "bf16", *COMPRESSED, "noop")


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
    topk_ratio: float = added(0.01)

    def __post_init__(self) -> None:
        if self.comm_hook == "onebit_adam":
            raise UserError(
                "framework.comm_hook=onebit_adam: 1-bit Adam compresses the momentum, and a hook of DDP has gradients "
                "alone; DeepSpeed no longer has it: use comm_hook=sign"
            )
        numbers = {"powersgd_rank": 1, "powersgd_start_step": 2}  # its errors feed back
        check_values(
            "framework.", self, above={"bucket_cap_mb": 0}, least=numbers, choices={"comm_hook": HOOKS},
            rules={"topk_ratio": (0 < self.topk_ratio <= 1, "greater than 0 and at most 1")},
        )  # fmt: skip

    def check(self, job: Job) -> None:
        hook = self.hook(job)
        check_reduction("ddp", job, hook)
        count = job.micro_batches(job.world_size)
        reasons = {
            f"static_graph does not support {count} micro batches per update (torch's reducer counts each backward "
            "pass): set framework.static_graph=false":
                self.static_graph and count > 1,
            f"the error feedback of {hook} never recovers from an overflow in fp16: use bf16 or comm_hook=fp16":
                hook in COMPRESSED and job.precision == "fp16",
            "without gradients of other ranks, replicas would skip different updates in fp16: use bf16":
                hook == "noop" and job.precision == "fp16",
        }  # fmt: skip
        refuse("ddp", reasons)
        check_alike(job, job.world_size, built=True)

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
        reason = "with comm_hook=noop every rank has other weights, and those of one rank are saved"
        refuse("ddp", {f"{reason}: set framework.comm_hook=none, or {OFF}": self.hook(job) == "noop"})

    def setup(self, job: Job) -> Replica:
        model, name, group = build(job), self.hook(job), all_ranks(job)
        wrapped = in_ddp(
            model,
            name,
            group,
            bucket_cap_mb=self.bucket_cap_mb,  # only for None torch keeps its small first bucket
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        parameters = dict(model.named_parameters())
        update = Update(job.optimizer(parameters.items()), job)
        rule = "torch's own: 1 MiB first, then 25 MiB"  # the first bucket holds the last layers, which are ready first
        facts: dict[str, Any] = {
            "bucket_cap_mb": self.bucket_cap_mb,
            "bucket_rule": rule if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g} MiB, the first one too",
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "comm_hook": name,
            "reduce_dtype": name if name in ("fp16", "bf16") else "fp32",
            **({"alike_after": self.powersgd_start_step} if name == "powersgd" else {}),
            **({"reference": NOTHING_SENT, "communication": "none"} if name == "noop" else {}),
        }
        replica = Replica(job, model, update, facts, trained=wrapped, dp_group=group)
        if name not in COMPRESSED:
            return replica
        if name == "powersgd":
            hook = PowerSGD(parameters, self.powersgd_rank, self.powersgd_start_step)
        else:
            compressor = {"topk": TopK(self.topk_ratio), "sign": Sign(), "int8": Int8()}[name]
            hook = ErrorFeedback(compressor, parameters)
        wrapped.register_comm_hook(None, lambda _, bucket: hook(bucket))
        replica.kept = hook
        return replica
