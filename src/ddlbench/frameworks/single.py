"""One process, no wrapper: the base of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.refusals import check_alike
from ddlbench.frameworks.shared.replica import Replica, Update, build
from ddlbench.job import Job


@dataclass
class Single:
    """Plain PyTorch on one device."""

    name: str = "single"

    def check(self, job: Job) -> None:
        if job.world_size != 1:
            raise Unsupported(
                f"framework=single runs in one process, this launch has {job.world_size}: "
                "start one, or use +framework=ddp"
            )
        check_alike(job, 1, built=True)

    def setup(self, job: Job) -> Replica:
        model = build(job)
        return Replica(job, model, Update(job.optimizer(model.named_parameters()), job), {"reduce_dtype": "fp32"})
