"""What a rank of a pipeline has: groups, the blocks of its stages, the clock of its device, and most of its trainer."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddlbench.frameworks.fsdp import shard
from ddlbench.frameworks.pipeline.schedules import rank_of
from ddlbench.frameworks.pipeline.stages import Plan, Stage, cut, tied_names
from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks, keep_costly_outputs
from ddlbench.frameworks.shared.groups import cpu_state, load_full_state, subgroup
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.frameworks.shared.replica import RankTrainer, Update
from ddlbench.frameworks.tensor.collectives import connect_parts
from ddlbench.frameworks.tensor.layers import full_state, local_state, split_model, splits_output
from ddlbench.job import Job, Place, on_meta
from ddlbench.measure.clock import Stamp, seconds, stamp
from ddlbench.measure.profiling.spans import profiling
from ddlbench.ranks.control import AsyncReduction
from ddlbench.ranks.launch import is_fake

Span = tuple[Stamp, Stamp]

RECENT_STEPS = 20  # enough for a median, few enough to read their events within the epoch's time


class Groups:
    """A rank's position in a mesh of replicas, parts and stages, and the groups that it is in. All ranks make it.

    part: this rank's part of every layer, with the tp_group
    pp_group: the ranks of this rank's pipeline, in order
    dp_group: the ranks with the same weights, None with one replica
    embedding_group: first and last rank of this rank's pipeline, None between them; used where a weight is tied. A
        pipeline that stays full has it for itself: both ends send in it between other messages, in another order
    norm_group: the ranks that together hold the gradients of one update: those of a replica, or all ranks if replicas
        are sharded; None if no update needs such a group
    first, last: whether this rank has the first, the last stage
    v_shaped: whether rank 0 of a pipeline has both (schedules.V_SHAPED)
    """

    def __init__(
        self, job: Job, layout: Layout, sharded: bool = False, v_shaped: bool = False, stays_full: bool = False
    ) -> None:
        self.layout, self.v_shaped = layout, v_shaped
        self.data_rank, _, self.stage_rank = layout.position(job.rank)
        self.part, _, self.dp_group = connect_parts(job, layout)
        self.first = self.stage_rank == 0
        self.last = self.first if v_shaped else self.stage_rank == layout.pp - 1
        self.pp_group = subgroup(layout.groups("pp"), job)
        ends = layout.pp > (1 if stays_full else 2) and not v_shaped and tied_names(on_meta(job))
        pairs = [[ranks[0], ranks[-1]] for ranks in layout.groups("pp")]
        self.embedding_group = subgroup(pairs, job, stays_full) if ends else self.pp_group
        self.norm_group = self.pp_group
        if sharded or layout.tp > 1:
            needed = job.clip_norm is not None or job.precision == "fp16"  # all skip an update that overflows in one
            dims = ("pp", "dp", "tp") if sharded else ("pp", "tp")
            self.norm_group = subgroup(layout.groups(*dims), job) if needed else None
        reads = self.part.rank == 0 and (self.first or self.last)
        coordinates = {"dp": self.data_rank, "pp": self.stage_rank, **({"tp": self.part.rank} if layout.tp > 1 else {})}
        self.place = Place(self.data_rank, layout.dp, reads, reads and self.last, coordinates)

    def open_links(self, device: torch.device, looped: bool) -> None:
        """Let NCCL make the communicators in which torch's schedules send to a neighbour: otherwise the first step
        would. looped: the last stage and stage 0 are neighbours too. All ranks take the pairs in the same order."""
        if is_fake():
            return
        stages = self.layout.pp
        pairs = [(stage, stage + 1) for stage in range(stages - 1)]
        if looped and stages > 2:
            pairs.append((0, stages - 1))
        token = torch.zeros(1, device=device)
        for sender, receiver in pairs:
            if self.stage_rank == sender:
                dist.send(token, group=self.pp_group, group_dst=receiver)
            elif self.stage_rank == receiver:
                dist.recv(token, group=self.pp_group, group_src=sender)
        token.item()


class Blocks:
    """The part of the model that a rank holds, split and sharded where asked.

    model: this rank's blocks by their names in the full model; stages: the same blocks, by the index of the stage
    sharded: replicas share gradients and optimizer state among them as FSDP does. Weights are gathered once an update,
        not for each micro batch
    shared: this rank's parameters of which the other end of the pipeline holds a copy (within one rank a tied parameter
        is one tensor, and autograd sums)
    """

    def __init__(self, job: Job, groups: Groups, plan: Plan, sharded: bool) -> None:
        self.groups, self.plan, self.sharded = groups, plan, sharded and groups.layout.dp > 1
        # Built in full on the CPU, so that all ranks have the same weights; only this rank's blocks go to the device.
        complete = replace(job, device=torch.device("cpu")).build()
        ties = tied_names(complete)
        parts = {
            index: part
            for index, part in enumerate(cut(complete, plan.sizes))
            if rank_of(index, groups.layout.pp, groups.v_shaped) == groups.stage_rank
        }
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
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        held = [([name for name in names if name in parameters], names) for names in ties]
        self.shared = [parameters[here[0]] for here, names in held if 0 < len(here) < len(names)]
        assert not self.shared or groups.first or groups.last, "only first and last stage may share a parameter"

    def edges(self, job: Job) -> list[Tensor]:
        """The plan's edges on this rank: where ranks share layers, some blocks give its slice of the features."""
        (first, *others), part = self.plan.edges, self.groups.part
        names, styles = [name for name, _ in on_meta(job).named_children()], job.model.tensor_plan()
        for stage, end in enumerate(accumulate(self.plan.sizes)):
            if part.size > 1 and splits_output(names[end - 1], styles):
                slice_ = others[stage].detach().narrow(-1, *part.span(others[stage].shape[-1]))
                others[stage] = slice_.contiguous().requires_grad_()
        return [first, *others]


class BusyClock:
    """Times when this rank's device computes within a schedule; waiting and sending are what is left."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: deque[tuple[Span, list[Span]]] = deque(maxlen=RECENT_STEPS)
        self.spans: list[Span] | None = None
        self.summed: AsyncReduction | None = None  # [steps, 2]: seconds of the schedule, of computing in it

    @contextmanager
    def schedule(self) -> Generator[None]:
        """One run of the schedule, from its first micro batch to its last."""
        begin, self.spans = stamp(self.device), list[Span]()
        yield
        self.steps.append(((begin, stamp(self.device)), self.spans))
        self.spans = None

    @contextmanager
    def computing(self) -> Generator[None]:
        """Work of this rank's device; it counts within a schedule. Also a decorator of a function."""
        begin = stamp(self.device)
        yield
        if self.spans is not None:
            self.spans.append((begin, stamp(self.device)))

    def add_up(self) -> None:
        """At the end of an epoch: start to sum over ranks the times of its recent steps. Every rank calls it. It waits
        for this rank's device and for no other rank, because the clock of the epoch is still on. Nothing is sent in a
        profiled window: its communication is the framework's alone."""
        if not self.steps or profiling():
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        times = [(seconds(*schedule), sum(seconds(*span) for span in spans)) for schedule, spans in self.steps]
        self.steps.clear()
        self.summed = AsyncReduction(torch.tensor(times, dtype=torch.float64))

    def bubble(self) -> float | None:
        """Share of the ranks' time in which they did not compute: the median over the recent steps of the last epoch
        that was added up, None before. Every rank returns the same; it waits until every rank has added up."""
        return median(1 - busy / schedule for schedule, busy in self.summed.result()) if self.summed else None


class StagedTrainer(RankTrainer):
    """What the trainers of pipelines have in common.

    model: this rank's blocks
    clock: when its device computes
    """

    def __init__(
        self, job: Job, blocks: Blocks, update: Update, micro_batches: int, facts: Mapping[str, Any], part: str
    ) -> None:
        dp_group, place = blocks.groups.dp_group, blocks.groups.place
        super().__init__(job, blocks.model, update, facts, dp_group=dp_group, place=place, saved_part=part)
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
