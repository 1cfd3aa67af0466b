"""Where a rank stands among pipelines side by side, and what it does together with whom. No schedule is named here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.frameworks.common import average, subgroup
from ddlbench.job import Job, Place


@dataclass(frozen=True)
class Groups:
    """Ranks r * dp to (r + 1) * dp - 1 hold copies of the same stages: neighbours average gradients.

    pipeline: the ranks of this rank's pipeline, in order; copies: those with the same stages, None with one pipeline;
    ends: first and last rank of this rank's pipeline, None between them
    """

    stage_rank: int
    ranks: int
    data_rank: int
    dp: int
    pipeline: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None

    @classmethod
    def connect(cls, job: Job, dp: int, ranks: int) -> Groups:
        """`dp` pipelines of `ranks` ranks each."""
        stage_rank, data_rank = divmod(job.rank, dp)
        layout = torch.arange(job.world_size).view(ranks, dp)
        pipeline = subgroup(layout.T.tolist(), job)
        copies = subgroup(layout.tolist(), job) if dp > 1 else None
        ends = subgroup(layout[[0, -1]].T.tolist(), job) if ranks > 2 else pipeline
        return cls(stage_rank, ranks, data_rank, dp, pipeline, copies, ends)

    @property
    def first(self) -> bool:
        return self.stage_rank == 0

    @property
    def last(self) -> bool:
        return self.stage_rank == self.ranks - 1

    def place(self) -> Place:
        coordinates = {"dp": self.data_rank, "pp": self.stage_rank}
        reads = self.first or self.last
        return Place(self.data_rank, self.dp, reads_data=reads, reports=self.last, coordinates=coordinates)

    def shared(self, model: nn.Module, ties: Sequence[Sequence[str]]) -> list[nn.Parameter]:
        """This rank's parameters of which the other end of the pipeline holds a copy. (Within one rank a tied parameter
        is one tensor, and autograd sums.) ties: the names of each tied parameter in the whole model."""
        own = dict(model.named_parameters(remove_duplicate=False))
        found = [([name for name in names if name in own], names) for names in ties]
        apart = [own[here[0]] for here, names in found if 0 < len(here) < len(names)]
        assert not apart or self.first or self.last, "only first and last stage may share a parameter"
        return apart

    def reduce(self, parameters: Iterable[nn.Parameter], shared: Sequence[nn.Parameter]) -> None:
        """Averages over copies first, sums of tied parameters then: two numbers add up to the same on both ends, so the
        two copies of a tied parameter stay equal to the last bit."""
        if self.copies is not None:
            average([gradient(parameter) for parameter in parameters], self.copies)
        for parameter in shared:
            dist.all_reduce(gradient(parameter), group=self.ends)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float, shared: Sequence[nn.Parameter]) -> None:
        """By the norm of the whole gradient, of which each rank has a part; what two ranks share counts once."""
        parameters = list(parameters)
        counted_elsewhere = {id(parameter) for parameter in shared if not self.first}
        own = [gradient(parameter) for parameter in parameters if id(parameter) not in counted_elsewhere]
        squared = nn.utils.get_total_norm(own).square()
        dist.all_reduce(squared, group=self.pipeline)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, squared.sqrt())

    def gather(self, part: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The parts of the first pipeline's ranks as one state, in their order, on rank 0; None elsewhere."""
        if self.data_rank > 0:
            return None
        parts: list[Any] | None = [None] * self.ranks if self.first else None
        dist.gather_object(part, parts, dst=0, group=self.pipeline)
        return None if parts is None else {name: tensor for each in parts for name, tensor in each.items()}


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
