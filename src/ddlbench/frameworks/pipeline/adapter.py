"""Pipelines of torch.distributed.pipelining: each rank holds some of the blocks, micro batches flow through all.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, with a flush), interleaved 1F1B (Narayanan et al. 2021) and
zero bubble (Qi et al. 2023, ZB-1P). With framework.dp > 1 there are several such pipelines: each stage averages its
gradients over its copies once, after the schedule has run. With framework.tp > 1 several ranks share the layers of each
stage: all together the hybrid of Narayanan et al. 2021 (docs/adr/0010).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.fsdp import check_shards
from ddlbench.frameworks.pipeline.blocks import Blocks, own_edges
from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.schedules import (
    LOOPED,
    SCHEDULES,
    bubble,
    check_split_backward,
    check_stages,
    micro_batch_count,
    pipeline_ranks,
)
from ddlbench.frameworks.pipeline.stages import Plan, Stage, block_count
from ddlbench.frameworks.shared.common import (
    Update,
    autocast,
    check_alike,
    drop,
)
from ddlbench.frameworks.tensor.checks import check_compile, check_parts
from ddlbench.frameworks.tensor.collectives import share
from ddlbench.frameworks.tensor.loss import loss_of_parts, whole_logits
from ddlbench.job import Batch, Job, Place


@dataclass
class Pipeline:
    """One pipeline over all ranks, or `dp` of them; conf/framework/gpipe.yaml says what each knob means."""

    name: str = "gpipe"
    schedule: str = field(default="gpipe", metadata={"defines": "hybrid"})
    dp: int = 1
    pp: int | None = None
    tp: int = 1
    sharded: bool = False
    virtual_stages: int = 1
    balance: list[int] | None = None
    flops_per_byte: float = 1000.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UserError(f"framework.schedule={self.schedule} is unknown: choose one of {', '.join(SCHEDULES)}")
        if min(self.dp, self.tp, self.virtual_stages, self.pp or 1) < 1:
            raise UserError(
                f"framework.dp={self.dp}, framework.tp={self.tp}, framework.pp={self.pp} and "
                f"framework.virtual_stages={self.virtual_stages} must be 1 or more"
            )
        if self.flops_per_byte < 0:
            raise UserError(f"framework.flops_per_byte={self.flops_per_byte:g} must be 0 or more")
        if self.virtual_stages > 1 and self.schedule not in LOOPED:
            raise UserError(
                f"framework.virtual_stages={self.virtual_stages} with framework.schedule={self.schedule}: "
                f"set it to 1, or choose framework.schedule={' or '.join(LOOPED)}"
            )

    def check(self, job: Job) -> None:
        ranks = pipeline_ranks(job.world_size, self.dp, self.pp, self.tp)
        micro_batch_count(self.schedule, job, ranks, self.dp)
        check_stages(ranks, self.virtual_stages, block_count(job), self.balance)
        if job.reduce_dtype != "fp32":
            raise Unsupported(
                f"{self.name}: gradients are averaged in fp32, not {job.reduce_dtype}: set train.reduce_dtype=fp32"
            )
        if ranks == 1 and self.schedule in LOOPED:
            raise Unsupported(f"{self.name}: {self.schedule} needs 2 ranks or more in a pipeline: use framework=gpipe")
        if self.schedule == "zero_bubble":
            check_split_backward(job)
        if self.tp > 1:
            check_parts(self.name, job, self.tp, ranks)
            check_compile(self.name, job)
        if self.sharded:
            check_shards(self.name, job)
        check_alike(job, self.dp)

    def setup(self, job: Job) -> Place:
        self.ranks = pipeline_ranks(job.world_size, self.dp, self.pp, self.tp)
        self.count = micro_batch_count(self.schedule, job, self.ranks, self.dp)
        self.groups = groups = Groups.connect(job, self.dp, self.ranks, self.tp, self.sharded)
        groups.open_links(job.device, looped=self.virtual_stages > 1)
        self.job = replace(job, loss=loss_of_parts(job, groups.part, parallel=True))
        self.clock, self.bubble = BusyClock(job.device), None
        self.losses: list[Tensor] = []
        samples = job.replica_batch(self.dp) // self.count
        self.plan = Plan.of(job, self.ranks * self.virtual_stages, samples, self.balance, self.flops_per_byte)
        self.blocks = Blocks(job, groups, self.plan, self.sharded)
        self.model = self.blocks.model
        self.runner = self._runner(self.blocks.stages)
        self.optimizer = job.optimizer(self.model.named_parameters())
        self.update = Update(self.optimizer, job, groups.update)
        return groups.place()

    def _runner(self, stages: Mapping[int, Stage]) -> Any:
        """torch's schedule over this rank's stages. Shapes are given, so that it need not run the model to find out."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        edges, made = own_edges(self.plan, self.job, self.groups.part), list[PipelineStage]()
        for index, blocks in stages.items():
            if self.job.compile:
                blocks.blocks.compile()
            before, after = edges[index : index + 2]
            count, group = len(self.plan.sizes), self.groups.pipeline
            stage = PipelineStage(blocks, index, count, self.job.device, before, after, group=group)
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, method, self.clock.computing(getattr(stage, method)))
            made.append(stage)
        schedule: Any = get_schedule_class(SCHEDULES[self.schedule])
        one_or_more = made if self.schedule in LOOPED else made[0]
        return schedule(one_or_more, self.count, loss_fn=self.clock.computing(self._loss), scale_grads=False)

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Of one micro batch, as its share of the replica's."""
        with autocast(self.job):
            loss = self.job.loss(output, targets) / self.count
        self.losses.append(loss.detach())
        return self.update.scale(loss)

    @property
    def updates(self) -> int:
        return self.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        self.losses.clear()
        if self.tp > 1:  # whatever a rank drew in between, the loader's for one: ranks that share layers draw the same
            torch.manual_seed(torch.initial_seed() + self.dp * self.ranks)
        inputs, targets = self._ends_of(batch)
        with as_raised(), self.clock.schedule():
            self.runner.step(*inputs, target=targets, return_outputs=False)
        with record_function("ddlbench/communicate"):
            self.blocks.reduce()
        self.update.apply(self.model.parameters(), self.blocks.clip)
        return torch.stack(self.losses).sum() if batch is not None and self.losses else None

    def _ends_of(self, batch: Batch | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What torch's schedule takes: inputs on the first stage's ranks, targets on the last one's."""
        first, last = self.groups.first, self.groups.last
        if not (first or last):
            return (), None
        shared = share(batch, self.job, self.job.replica_batch(self.dp), self.groups.part)
        return (shared.inputs,) if first else (), shared.targets if last else None

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        self.blocks.statistics.settle()
        inputs, targets = self._ends_of(batch)
        self.model.eval()
        with as_raised(), torch.no_grad():
            output = self.runner.eval(*inputs, target=targets)
        self.model.train()
        self.blocks.fold()
        if not self.groups.last:
            return None
        whole = whole_logits(output, self.job, self.groups.part)
        return whole if batch is not None else None

    def flush(self) -> None:
        """The schedules end with an empty pipeline: only its clock is read."""
        self.bubble = self.clock.bubble()

    def state(self) -> dict[str, Tensor] | None:
        return self.blocks.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.blocks.load(state)

    def facts(self) -> dict[str, Any]:
        return {
            "staleness": 0,
            "schedule": self.schedule,
            "dp": self.dp,
            "tp": self.tp,
            "pp": self.ranks,
            "shards": self.dp if self.sharded else 1,
            "virtual_stages": self.virtual_stages,
            **self.plan.facts(),
            "micro_batches": self.count,
            "micro_batches_rule": "4 a rank" if self.job.micro_batch is None else "train.micro_batch",
            "bubble": self.bubble,
            "bubble_theoretical": bubble(self.schedule, self.count, self.ranks, self.virtual_stages),
            "reduce_dtype": "fp32",
        }

    def close(self) -> None:
        drop(self, "runner", "blocks", "model", "optimizer", "update")


@contextmanager
def as_raised() -> Generator[None]:
    """torch wraps what a stage raises, but whoever records it wants to tell memory that ran out from other errors."""
    try:
        yield
    except RuntimeError as error:
        raise (error.__cause__ or error) from None
