"""The position of a rank among replicas, stages and parts of layers, and the groups that it is in."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddlbench.frameworks.pipeline.schedules import rank_of
from ddlbench.frameworks.pipeline.stages import tied_names
from ddlbench.frameworks.shared.groups import subgroup
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.job import Job, Place, on_meta
from ddlbench.ranks.launch import is_fake


class Groups:
    """A rank's place in a mesh of replicas, parts and stages, and the groups that it is in. All ranks make it.

    part: this rank's part of every layer, with the tp_group
    pp_group: the ranks of this rank's pipeline, in order
    dp_group: the ranks with the same weights, None with one replica
    embedding_group: first and last rank of this rank's pipeline, None between them; used where a weight is tied
    norm_group: the ranks that together hold the gradients of one update: those of a replica, all with shards; None
        where no update needs such a group
    first, last: whether this rank has the first, the last stage
    v_shaped: whether rank 0 of a pipeline has both (schedules.V_SHAPED)
    """

    def __init__(self, job: Job, layout: Layout, sharded: bool = False, v_shaped: bool = False) -> None:
        self.layout, self.v_shaped = layout, v_shaped
        self.data_rank, tp_rank, self.stage_rank = layout.position(job.rank)
        self.first = self.stage_rank == 0
        self.last = self.first if v_shaped else self.stage_rank == layout.pp - 1
        self.pp_group = subgroup(layout.groups("pp"), job)
        self.dp_group = subgroup(layout.groups("dp"), job) if layout.dp > 1 else None
        ends = layout.pp > 2 and not v_shaped and tied_names(on_meta(job))
        self.embedding_group = subgroup(layout.embedding_groups(), job) if ends else self.pp_group
        self.part = Part(subgroup(layout.groups("tp"), job) if layout.tp > 1 else None, tp_rank, layout.tp)
        self.norm_group = self.pp_group
        if sharded or layout.tp > 1:
            needed = job.clip_norm is not None or job.precision == "fp16"  # all skip an update that overflows in one
            dims = ("pp", "dp", "tp") if sharded else ("pp", "tp")
            self.norm_group = subgroup(layout.groups(*dims), job) if needed else None

    def has(self, stage: int) -> bool:
        return self.stage_rank == rank_of(stage, self.layout.pp, self.v_shaped)

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

    def place(self) -> Place:
        tp = {"tp": self.part.rank} if self.part.size > 1 else {}
        leads = self.part.rank == 0
        return Place(
            self.data_rank,
            self.layout.dp,
            reads_data=leads and (self.first or self.last),
            reports=leads and self.last,
            coordinates={"dp": self.data_rank, "pp": self.stage_rank, **tp},
        )
