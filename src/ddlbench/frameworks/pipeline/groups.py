"""Where a rank stands among replicas, stages and parts of layers, and what it does together with whom. No schedule is
named here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.batchnorm import average
from ddlbench.frameworks.shared.common import gradient, subgroup
from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.job import Job, Place
from ddlbench.ranks.launch import SHARED_GPU


@dataclass(frozen=True)
class Groups:
    """One mesh of `ranks` stages x `dp` replicas x `tp` parts: rank (stage * dp + replica) * tp + part. What is sent
    most goes between neighbours: activations within a layer first, gradients of copies next.

    part: this rank's, among those that share every layer
    pipeline: the ranks of this rank's pipeline, in order; copies: those with the same weights, None with one replica;
    ends: first and last rank of this rank's pipeline, None between them; update: the ranks of which each has some of
    the gradients of one update, those of a replica or with shards all
    """

    stage_rank: int
    ranks: int
    data_rank: int
    dp: int
    part: Part
    pipeline: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None
    update: dist.ProcessGroup | None

    @classmethod
    def connect(cls, job: Job, dp: int, ranks: int, tp: int = 1, sharded: bool = False) -> Groups:
        """`dp` pipelines of `ranks` stages each, every stage shared by `tp` ranks."""
        if ranks > 1 and job.device.type == "cuda" and SHARED_GPU in dist.get_backend_config():
            raise Unsupported(f"backend={SHARED_GPU}: gloo cannot send tensors of a GPU, and a pipeline sends them")
        layout = torch.arange(job.world_size).view(ranks, dp, tp)
        stage_rank, data_rank, part_rank = (int(index) for index in (layout == job.rank).nonzero()[0])
        pipeline = subgroup(layout.permute(1, 2, 0).flatten(0, 1).tolist(), job)
        copies = subgroup(layout.transpose(1, 2).flatten(0, 1).tolist(), job) if dp > 1 else None
        ends = subgroup(layout[[0, -1]].permute(1, 2, 0).flatten(0, 1).tolist(), job) if ranks > 2 else pipeline
        parts = subgroup(layout.flatten(0, 1).tolist(), job) if tp > 1 else None
        replica = subgroup(layout.transpose(0, 1).flatten(1).tolist(), job) if tp > 1 else pipeline
        update = dist.group.WORLD if sharded else replica
        part = Part(parts, part_rank, tp)
        return cls(stage_rank, ranks, data_rank, dp, part, pipeline, copies, ends, update)

    @property
    def first(self) -> bool:
        return self.stage_rank == 0

    @property
    def last(self) -> bool:
        return self.stage_rank == self.ranks - 1

    def open_links(self, device: torch.device, looped: bool) -> None:
        """Let NCCL make the communicator of two ranks in which torch's schedules send to a neighbour: otherwise the
        first step would. looped: last rank and first rank are neighbours too. All ranks take the pairs in one order."""
        pairs = [(rank, rank + 1) for rank in range(self.ranks - 1)]
        if looped and self.ranks > 2:
            pairs.append((0, self.ranks - 1))
        token = torch.zeros(1, device=device)
        for sender, receiver in pairs:
            if self.stage_rank == sender:
                dist.send(token, group=self.pipeline, group_dst=receiver)
            elif self.stage_rank == receiver:
                dist.recv(token, group=self.pipeline, group_src=sender)
        token.item()

    def place(self) -> Place:
        coordinates = {"dp": self.data_rank, "pp": self.stage_rank}
        if self.part.size > 1:
            coordinates["tp"] = self.part.rank
        leads = self.part.rank == 0
        reads = leads and (self.first or self.last)
        return Place(self.data_rank, self.dp, reads_data=reads, reports=leads and self.last, coordinates=coordinates)

    def shared(self, model: nn.Module, ties: Sequence[Sequence[str]]) -> list[nn.Parameter]:
        """This rank's parameters of which the other end of the pipeline holds a copy. (Within one rank a tied parameter
        is one tensor, and autograd sums.) ties: the names of each tied parameter in the whole model."""
        own = dict(model.named_parameters(remove_duplicate=False))
        found = [([name for name in names if name in own], names) for names in ties]
        apart = [own[here[0]] for here, names in found if 0 < len(here) < len(names)]
        assert not apart or self.first or self.last, "only first and last stage may share a parameter"
        return apart

    def reduce(self, gradients: Sequence[Tensor], shared: Sequence[nn.Parameter]) -> None:
        """Averages over copies first, sums of tied parameters then: two numbers add up to the same on both ends, so the
        two copies of a tied parameter stay equal to the last bit. gradients: those that nobody has averaged yet."""
        if self.copies is not None and gradients:
            average(gradients, self.copies)
        for parameter in shared:
            dist.all_reduce(gradient(parameter), group=self.ends)

    def gather(self, own: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The states of the first pipeline's ranks as one, in their order, on rank 0; None elsewhere."""
        if self.data_rank > 0 or self.part.rank > 0:
            return None
        parts: list[Any] | None = [None] * self.ranks if self.first else None
        dist.gather_object(own, parts, dst=0, group=self.pipeline)
        return None if parts is None else {name: tensor for each in parts for name, tensor in each.items()}
