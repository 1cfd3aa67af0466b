"""The part of the model that a rank of a pipeline holds: the blocks of its stages, split and sharded where asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddlbench.frameworks.fsdp import shard
from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.stages import Plan, Stage, cut, tied_names
from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks, keep_costly_outputs
from ddlbench.frameworks.shared.groups import average, clip_parts, gradient
from ddlbench.frameworks.shared.replica import RankTrainer, cpu_state, load_full_state
from ddlbench.frameworks.shared.step import Update
from ddlbench.frameworks.tensor.layers import full_state, local_state, split_model, splits_output
from ddlbench.job import Job, on_meta


class Blocks:
    """model: this rank's blocks by their names in the full model; stages: the same blocks, by the index of the stage.

    sharded: replicas share gradients and optimizer state among them as FSDP does. Weights are gathered once an update,
    not for each micro batch.
    """

    def __init__(self, job: Job, groups: Groups, plan: Plan, sharded: bool) -> None:
        self.groups, self.plan, self.sharded = groups, plan, sharded and groups.layout.dp > 1
        # Built in full on the CPU, so that all ranks have the same weights; only this rank's blocks go to the device.
        complete = replace(job, device=torch.device("cpu")).build()
        ties = tied_names(complete)
        parts = {index: part for index, part in enumerate(cut(complete, plan.sizes)) if groups.has(index)}
        self.model = nn.Sequential(OrderedDict(block for part in parts.values() for block in part.named_children()))
        self.splits = split_model(self.model, job.model.tensor_plan(), groups.part)
        self.model.to(job.device)
        for index, part in parts.items():
            checkpoint_blocks(part, plan.segments[index])
            if plan.selective:
                keep_costly_outputs(part)
        self.stages = {index: Stage(part, job) for index, part in parts.items()}
        if self.sharded:
            assert groups.dp_group is not None
            # fully_shard needs contiguous weights; the input of a stage decides how a convolution runs.
            self.model.to(memory_format=torch.contiguous_format)
            mesh = DeviceMesh.from_group(groups.dp_group, job.device.type, mesh_dim_names=("shard",))
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            for stage in self.stages.values():
                shard(stage.blocks, mesh, False, policy)
                fully_shard(stage, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        self.shared = self._shared(ties)

    def _shared(self, ties: Sequence[Sequence[str]]) -> list[nn.Parameter]:
        """This rank's parameters of which the other end of the pipeline holds a copy. (Within one rank a tied parameter
        is one tensor, and autograd sums.) ties: the names of each tied parameter in the full model."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        held = [([name for name in names if name in parameters], names) for names in ties]
        shared = [parameters[here[0]] for here, names in held if 0 < len(here) < len(names)]
        assert not shared or self.groups.first or self.groups.last, "only first and last stage may share a parameter"
        return shared

    def edges(self, job: Job) -> list[Tensor]:
        """The plan's edges on this rank: where ranks share layers, some blocks give its slice of the features."""
        (first, *others), part = self.plan.edges, self.groups.part
        names, styles = [name for name, _ in on_meta(job).named_children()], job.model.tensor_plan()
        for stage, end in enumerate(accumulate(self.plan.sizes)):
            if part.size > 1 and splits_output(names[end - 1], styles):
                slice_ = others[stage].detach().narrow(-1, *part.span(others[stage].shape[-1]))
                others[stage] = slice_.contiguous().requires_grad_()
        return [first, *others]

    def reduce(self) -> None:
        """Average gradients over replicas (torch's schedule has averaged sharded ones), then sum those of tied
        parameters: two numbers add up to the same on both ends, so both copies stay equal to the last bit."""
        if self.groups.dp_group is not None and not self.sharded:
            average([gradient(parameter) for parameter in self.model.parameters()], self.groups.dp_group)
        for parameter in self.shared:
            dist.all_reduce(gradient(parameter), group=self.groups.embedding_group)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        clip_parts(parameters, max_norm, self._counted(), self.groups.norm_group)

    def _counted(self) -> list[nn.Parameter]:
        """The parameters that this rank adds to the norm: tied ones on the first stage only, unsplit ones on part 0."""
        elsewhere = set[int]() if self.groups.first else {id(parameter) for parameter in self.shared}
        return [
            parameter
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in elsewhere and (name in self.splits or self.groups.part.rank == 0)
        ]


class StagedTrainer(RankTrainer):
    """What the trainers of pipelines have in common.

    model: this rank's blocks
    clock: when its device computes
    """

    def __init__(
        self, job: Job, blocks: Blocks, update: Update, micro_batches: int, facts: Mapping[str, Any], part: str
    ) -> None:
        super().__init__(job, blocks.model, update, blocks.groups.dp_group, blocks.groups.place(), facts, part)
        self.blocks, self.groups, self.micro_batches = blocks, blocks.groups, micro_batches
        self.clock = BusyClock(job.device)

    def state(self) -> dict[str, Tensor] | None:
        """The full model's state on rank 0, from the stages of the first pipeline in their order; None elsewhere."""
        self.synchronize()
        groups, first_pipeline = self.groups, self.groups.data_rank == 0
        state = cpu_state(self.model, keep=first_pipeline)
        stage = full_state(state, self.blocks.splits, groups.part) if first_pipeline else None
        if stage is None:
            return None
        stages: list[Any] | None = [None] * groups.layout.pp if groups.first else None
        dist.gather_object(stage, stages, dst=0, group=groups.pp_group)
        return None if stages is None else {name: tensor for stage in stages for name, tensor in stage.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        named = {name: state[name] for name in self.model.state_dict()}
        load_full_state(self.model, local_state(named, self.blocks.splits, self.groups.part))

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "bubble": self.clock.bubble()}
