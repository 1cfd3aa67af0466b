"""Local SGD (Stich 2019; Lin et al. 2020): replicas train alone for k steps, then their weights are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddlbench.errors import check_values, refuse
from ddlbench.frameworks.shared.groups import all_ranks, average, average_statistics
from ddlbench.frameworks.shared.refusals import check_alike
from ddlbench.frameworks.shared.replica import Replica, Update, build
from ddlbench.job import Batch, Job
from ddlbench.measure.profiling.spans import COMMUNICATE, span


@dataclass
class LocalSGD:
    """Weights and BatchNorm's statistics are averaged; momentum and the norm for clipping are those of one replica."""

    name: str = "local_sgd"
    local_steps: int = 8

    def __post_init__(self) -> None:
        check_values("framework.", self, least={"local_steps": 1})

    def check(self, job: Job) -> None:
        reasons = {
            f"averages weights in fp32 and sends no gradients in {job.reduce_dtype}: set train.reduce_dtype=fp32":
                job.reduce_dtype != "fp32",
            "in fp16 replicas would skip different updates: set train.precision=bf16": job.precision == "fp16",
        }  # fmt: skip
        refuse(self.name, reasons)
        check_alike(job, job.world_size, built=True)

    def setup(self, job: Job) -> LocalReplica:
        return LocalReplica(job, build(job), self.local_steps)


class LocalReplica(Replica):
    """A replica that counts its updates since the last average."""

    def __init__(self, job: Job, model: nn.Module, local_steps: int) -> None:
        facts = {"local_steps": local_steps, "reduce_dtype": "fp32"}
        part = f"replica{job.rank}"  # momentum is never averaged
        update = Update(job.optimizer(model.named_parameters()), job)
        super().__init__(job, model, update, facts, saved_part=part)
        self.group = all_ranks(job)
        self.local_steps, self.updates_since_average = local_steps, 0

    def step(self, batch: Batch | None) -> Tensor | None:
        loss = super().step(batch)
        self.updates_since_average += 1
        if self.updates_since_average == self.local_steps:
            self.flush()
        return loss

    def flush(self) -> None:
        """All replicas become their mean: every `local_steps` updates and at the end of an epoch."""
        if self.updates_since_average:
            with torch.no_grad(), span(COMMUNICATE):
                average(list(self.model.parameters()), self.group)
                average_statistics(self.model, self.group)
            self.updates_since_average = 0

    def synchronize(self) -> None:
        self.flush()

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        self.updates_since_average = 0
