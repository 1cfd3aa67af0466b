"""Pipelines of torch.distributed.pipelining: each rank holds some of the blocks, micro batches flow through all.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, with a flush), interleaved 1F1B (Narayanan et al. 2021) and
zero bubble (Qi et al. 2023, ZB-1P). With framework.dp > 1 there are several such pipelines: each stage averages its
gradients over its copies once, after the schedule has run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.common import (
    Update,
    autocast,
    average_statistics,
    check_alike,
    checkpoint_blocks,
    drop,
    whole_state,
)
from ddlbench.frameworks.pipeline_clock import BusyClock
from ddlbench.frameworks.pipeline_groups import Groups
from ddlbench.frameworks.pipeline_schedules import (
    LOOPED,
    SCHEDULES,
    bubble,
    check_split_backward,
    check_stages,
    micro_batch_count,
    pipeline_ranks,
)
from ddlbench.frameworks.stages import Plan, Stage, block_count, cut, tied_names
from ddlbench.job import Batch, Job, Place


@dataclass
class Pipeline:
    """One pipeline over all ranks, or `dp` of them; conf/framework/gpipe.yaml says what each knob means."""

    name: str = "gpipe"
    schedule: str = "gpipe"
    dp: int = 1
    pp: int | None = None
    virtual_stages: int = 1
    balance: list[int] | None = None
    flops_per_byte: float = 1000.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UserError(f"framework.schedule={self.schedule} is unknown: choose one of {', '.join(SCHEDULES)}")
        if min(self.dp, self.virtual_stages, self.pp or 1) < 1:
            raise UserError(
                f"framework.dp={self.dp}, framework.pp={self.pp} and framework.virtual_stages={self.virtual_stages} "
                "must be 1 or more"
            )
        if self.flops_per_byte < 0:
            raise UserError(f"framework.flops_per_byte={self.flops_per_byte:g} must be 0 or more")
        if self.virtual_stages > 1 and self.schedule not in LOOPED:
            raise UserError(
                f"framework.virtual_stages={self.virtual_stages} with framework.schedule={self.schedule}: "
                f"set it to 1, or choose framework.schedule={' or '.join(LOOPED)}"
            )

    def check(self, job: Job) -> None:
        ranks = pipeline_ranks(job.world_size, self.dp, self.pp)
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
        check_alike(job, self.dp)

    def setup(self, job: Job) -> Place:
        self.job = job
        self.ranks = pipeline_ranks(job.world_size, self.dp, self.pp)
        self.count = micro_batch_count(self.schedule, job, self.ranks, self.dp)
        self.groups = Groups.connect(job, self.dp, self.ranks)
        self.clock, self.bubble = BusyClock(job.device), None
        self.losses: list[Tensor] = []
        samples = job.replica_batch(self.dp) // self.count
        self.plan = Plan.of(job, self.ranks * self.virtual_stages, samples, self.balance, self.flops_per_byte)
        self._build()
        self.settled = True
        return self.groups.place()

    def _build(self) -> None:
        """Built whole on the CPU, for the same weights everywhere; only this rank's blocks go to the device."""
        whole = replace(self.job, device=torch.device("cpu")).build()
        parts = {
            index: blocks.to(self.job.device)
            for index, blocks in enumerate(cut(whole, self.plan.sizes))
            if index % self.ranks == self.groups.stage_rank
        }
        self.model = nn.Sequential(OrderedDict(block for part in parts.values() for block in part.named_children()))
        self.shared = self.groups.shared(self.model, tied_names(whole))
        if self.job.checkpoint_activations:
            checkpoint_blocks(self.model)
        self.runner = self._runner(parts)
        self.optimizer = self.job.optimizer(self.model.named_parameters())
        self.update = Update(self.optimizer, self.job, self.groups.pipeline)

    def _runner(self, parts: Mapping[int, nn.Sequential]) -> Any:
        """torch's schedule over this rank's stages. Shapes are given, so that it need not run the model to find out."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages: list[PipelineStage] = []
        for index, part in parts.items():
            if self.job.compile:
                part.compile()
            before, after = self.plan.edges[index : index + 2]
            module, group = Stage(part, self.job), self.groups.pipeline
            stage = PipelineStage(module, index, len(self.plan.sizes), self.job.device, before, after, group=group)
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, method, self.clock.computing(getattr(stage, method)))
            stages.append(stage)
        schedule: Any = get_schedule_class(SCHEDULES[self.schedule])
        one_or_more = stages if self.schedule in LOOPED else stages[0]
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
        inputs, targets = self._ends_of(batch)
        with as_raised(), self.clock.schedule():
            self.runner.step(*inputs, target=targets, return_outputs=False)
        with record_function("ddlbench/communicate"):
            self.groups.reduce(self.model.parameters(), self.shared)
        self.update.apply(self.model.parameters(), partial(self.groups.clip, shared=self.shared))
        self.settled = False
        return torch.stack(self.losses).sum() if self.losses else None

    def _ends_of(self, batch: Batch | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What torch's schedule takes: inputs on the first stage's rank, targets on the last one's."""
        first, last = self.groups.first, self.groups.last
        assert batch is not None or not (first or last)
        inputs = (batch.inputs,) if first and batch is not None else ()
        return inputs, batch.targets if last and batch is not None else None

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        self._settle()
        inputs, targets = self._ends_of(batch)
        self.model.eval()
        with as_raised(), torch.no_grad():
            output = self.runner.eval(*inputs, target=targets)
        self.model.train()
        return output

    def _settle(self) -> None:
        if not self.settled and self.groups.copies is not None:
            average_statistics(self.model, self.groups.copies)
        self.settled = True

    def flush(self) -> None:
        """The schedules end with an empty pipeline: only its clock is read."""
        self.bubble = self.clock.bubble()

    def state(self) -> dict[str, Tensor] | None:
        self._settle()
        return self.groups.gather(whole_state(self.model))

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})

    def facts(self) -> dict[str, Any]:
        return {
            "staleness": 0,
            "schedule": self.schedule,
            "pp": self.ranks,
            "virtual_stages": self.virtual_stages,
            **self.plan.facts(),
            "micro_batches": self.count,
            "micro_batches_rule": "4 a rank" if self.job.micro_batch is None else "train.micro_batch",
            "bubble": self.bubble,
            "bubble_theoretical": bubble(self.schedule, self.count, self.ranks, self.virtual_stages),
            "reduce_dtype": "fp32",
        }

    def close(self) -> None:
        drop(self, "runner", "model", "shared", "optimizer", "update")


@contextmanager
def as_raised() -> Generator[None]:
    """torch wraps what a stage raises, but whoever records it wants to tell memory that ran out from other errors."""
    try:
        yield
    except RuntimeError as error:
        raise (error.__cause__ or error) from None
