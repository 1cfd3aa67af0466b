"""Pipelines of torch.distributed.pipelining: each rank holds some of the blocks, micro batches flow through all.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, with a flush), interleaved 1F1B (Narayanan et al. 2021) and
zero bubble (Qi et al. 2023, ZB-1P). With framework.dp > 1 there are several such pipelines: each stage averages its
gradients over its copies once, after the schedule has run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.common import (
    Update,
    autocast,
    average,
    average_statistics,
    checkpoint_blocks,
    subgroup,
    whole_state,
)
from ddlbench.frameworks.pipeline_schedules import (
    LOOPED,
    SCHEDULES,
    bubble,
    check_split_backward,
    check_stages,
    micro_batch_count,
    pipeline_ranks,
)
from ddlbench.frameworks.stages import Stage, balanced, borders, cut, stage_costs, tied_names
from ddlbench.job import Batch, Job, Place
from ddlbench.measure.flops import forward_flops_per_block


@dataclass
class Pipeline:
    """One pipeline over all ranks, or `dp` of them; conf/framework/gpipe.yaml says what each knob means."""

    name: str = "gpipe"
    schedule: str = "gpipe"
    dp: int = 1
    pp: int | None = None
    virtual_stages: int = 1
    balance: list[int] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UserError(f"framework.schedule={self.schedule} is unknown: choose one of {', '.join(SCHEDULES)}")
        if min(self.dp, self.virtual_stages, self.pp or 1) < 1:
            raise UserError(
                f"framework.dp={self.dp}, framework.pp={self.pp} and framework.virtual_stages={self.virtual_stages} "
                "must be 1 or more"
            )
        if self.virtual_stages > 1 and self.schedule not in LOOPED:
            raise UserError(
                f"framework.virtual_stages={self.virtual_stages} with framework.schedule={self.schedule}: "
                f"set it to 1, or choose framework.schedule={' or '.join(LOOPED)}"
            )

    def check(self, job: Job) -> None:
        ranks = pipeline_ranks(job.world_size, self.dp, self.pp)
        micro_batch_count(self.schedule, job, ranks, self.dp)
        check_stages(ranks, self.virtual_stages, len(forward_flops_per_block(job.model)), self.balance)
        if job.precision == "fp16":
            raise Unsupported(
                f"{self.name}: fp16 needs one loss scale that all stages agree on at each overflow, and the schedules "
                "have no place for it: use train.precision=bf16 or fp32"
            )
        if job.reduce_dtype != "fp32":
            raise Unsupported(
                f"{self.name}: gradients are averaged in fp32, not {job.reduce_dtype}: set train.reduce_dtype=fp32"
            )
        if ranks == 1 and self.schedule in LOOPED:
            raise Unsupported(f"{self.name}: {self.schedule} needs 2 ranks or more in a pipeline: use framework=gpipe")
        if self.schedule == "zero_bubble":
            check_split_backward(job)

    def setup(self, job: Job) -> Place:
        self.job = job
        self.ranks = pipeline_ranks(job.world_size, self.dp, self.pp)
        self.count = micro_batch_count(self.schedule, job, self.ranks, self.dp)
        self._plan()
        self._connect()
        self._build()
        self.settled = True
        first, last = self.stage_rank == 0, self.stage_rank == self.ranks - 1
        coordinates = {"dp": self.data_rank, "pp": self.stage_rank}
        return Place(self.data_rank, self.dp, reads_data=first or last, reports=last, coordinates=coordinates)

    def _plan(self) -> None:
        """Which blocks make a stage, and what passes between stages: the same on every rank."""
        costs = list(forward_flops_per_block(self.job.model).values())
        self.sizes = self.balance or balanced(costs, self.ranks * self.virtual_stages)
        self.costs = stage_costs(costs, self.sizes)
        self.borders = borders(self.job, self.sizes, self.job.replica_batch(self.dp) // self.count)

    def _connect(self) -> None:
        """Ranks r * dp to (r + 1) * dp - 1 hold copies of the same stages: neighbours average gradients."""
        job = self.job
        self.stage_rank, self.data_rank = divmod(job.rank, self.dp)
        layout = torch.arange(job.world_size).view(self.ranks, self.dp)
        self.pipeline = subgroup(layout.T.tolist(), job)
        self.copies = subgroup(layout.tolist(), job) if self.dp > 1 else None
        self.ends = subgroup(layout[[0, -1]].T.tolist(), job) if self.ranks > 1 else None

    def _build(self) -> None:
        """Built whole on the CPU, for the same weights everywhere; only this rank's blocks go to the device."""
        whole = replace(self.job, device=torch.device("cpu")).build()
        parts = {
            index: blocks.to(self.job.device)
            for index, blocks in enumerate(cut(whole, self.sizes))
            if index % self.ranks == self.stage_rank
        }
        self.model = nn.Sequential(OrderedDict(block for part in parts.values() for block in part.named_children()))
        self.shared = self._shared(tied_names(whole))
        if self.job.checkpoint_activations:
            checkpoint_blocks(self.model)
        self.runner = self._runner(parts)
        self.optimizer = self.job.optimizer(self.model.named_parameters())
        self.update = Update(self.optimizer, self.job)

    def _shared(self, ties: Sequence[Sequence[str]]) -> list[nn.Parameter]:
        """This rank's parameters of which the other end of the pipeline holds a copy. (Within one rank a tied parameter
        is one tensor, and autograd sums.)"""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        apart = [[name for name in names if name in own] for names in ties]
        apart = [found for found, names in zip(apart, ties, strict=True) if 0 < len(found) < len(names)]
        assert not apart or self.stage_rank in (0, self.ranks - 1), "only first and last stage may share a parameter"
        return [own[found[0]] for found in apart]

    def _runner(self, parts: Mapping[int, nn.Sequential]) -> Any:
        """torch's schedule over this rank's stages. Shapes are given, so that it need not run the model to find out."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages: list[PipelineStage] = []
        for index, part in parts.items():
            if self.job.compile:
                part.compile()
            before, after = self.borders[index : index + 2]
            module = Stage(part, self.job)
            stages.append(
                PipelineStage(module, index, len(self.sizes), self.job.device, before, after, group=self.pipeline)
            )
        schedule: Any = get_schedule_class(SCHEDULES[self.schedule])
        looped = self.schedule in LOOPED
        return schedule(stages if looped else stages[0], self.count, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.job):
            return self.job.loss(output, targets) / self.count

    @property
    def updates(self) -> int:
        return self.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        losses: list[Tensor] = []
        inputs, targets = self._ends_of(batch)
        self.runner.step(*inputs, target=targets, losses=losses, return_outputs=False)
        with record_function("ddlbench/communicate"):
            self._reduce()
        self.update.apply(self.model.parameters(), self._clip)
        self.settled = False
        return torch.stack(losses).sum().detach() if losses else None

    def _ends_of(self, batch: Batch | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What torch's schedule takes: inputs on the first stage's rank, targets on the last one's."""
        first, last = self.stage_rank == 0, self.stage_rank == self.ranks - 1
        assert batch is not None or not (first or last)
        inputs = (batch.inputs,) if first and batch is not None else ()
        return inputs, batch.targets if last and batch is not None else None

    def _reduce(self) -> None:
        """Averages over copies first, sums of tied parameters then: two numbers add up to the same on both ends, so the
        two copies of a tied parameter stay equal to the last bit."""
        if self.copies is not None:
            average([gradient(parameter) for parameter in self.model.parameters()], self.copies)
        for parameter in self.shared:
            dist.all_reduce(gradient(parameter), group=self.ends)

    def _clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """By the norm of the whole gradient, of which each rank has a part; what two ranks share counts once."""
        parameters = list(parameters)
        counted_elsewhere = {id(parameter) for parameter in self.shared if self.stage_rank > 0}
        own = [gradient(parameter) for parameter in parameters if id(parameter) not in counted_elsewhere]
        squared = nn.utils.get_total_norm(own).square()
        dist.all_reduce(squared, group=self.pipeline)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, squared.sqrt())

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        self._settle()
        inputs, targets = self._ends_of(batch)
        self.model.eval()
        with torch.no_grad():
            output = self.runner.eval(*inputs, target=targets)
        self.model.train()
        return output

    def _settle(self) -> None:
        if not self.settled and self.copies is not None:
            average_statistics(self.model, self.copies)
        self.settled = True

    def flush(self) -> None:
        """The schedules end with an empty pipeline."""

    def state(self) -> dict[str, Tensor] | None:
        self._settle()
        if self.data_rank > 0:
            return None
        parts: list[Any] | None = [None] * self.ranks if self.job.rank == 0 else None
        dist.gather_object(whole_state(self.model), parts, dst=0, group=self.pipeline)
        return None if parts is None else {name: tensor for part in parts for name, tensor in part.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})

    def facts(self) -> dict[str, Any]:
        between = self.borders[1:-1]
        return {
            "staleness": 0,
            "schedule": self.schedule,
            "pp": self.ranks,
            "virtual_stages": self.virtual_stages,
            "blocks_per_stage": self.sizes,
            "flops_largest_over_mean_stage": max(self.costs) * len(self.costs) / sum(self.costs),
            "micro_batches": self.count,
            "micro_batches_rule": "4 a rank" if self.job.micro_batch is None else "train.micro_batch",
            "bubble_theoretical": bubble(self.schedule, self.count, self.ranks, self.virtual_stages),
            "activation_dtypes": [str(border.dtype).removeprefix("torch.") for border in between],
            "activation_bytes": [border.numel() * border.element_size() for border in between],
            "reduce_dtype": "fp32",
        }

    def close(self) -> None:
        for name in ("runner", "model", "shared", "optimizer", "update"):
            self.__dict__.pop(name, None)


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
