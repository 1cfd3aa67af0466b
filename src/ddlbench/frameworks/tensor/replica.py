"""Live replicas whose ranks share each step: the layers (`TensorReplica`), or the images (frameworks/spatial)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.frameworks.shared.groups import average, clip_parts, gradient
from ddlbench.frameworks.shared.replica import Replica, cpu_state, in_ddp
from ddlbench.frameworks.shared.step import Update
from ddlbench.frameworks.tensor.collectives import Part, share
from ddlbench.frameworks.tensor.layers import Splits, full_state, local_state
from ddlbench.frameworks.tensor.loss import full_logits
from ddlbench.job import Batch, Job, Place


class SharedReplica(Replica):
    """A replica whose first rank reads the batch, shares it with the others of its `part`, and reports."""

    part: Part

    def step(self, batch: Batch | None) -> Tensor | None:
        # All ranks of a replica draw the same numbers in a step, also if the rank that loads has drawn some in between.
        torch.manual_seed(torch.initial_seed() + self.place.data_size)
        loss = super().step(self.shared(batch))
        return loss if batch is not None else None

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        output = super().evaluate(self.shared(batch))
        return output if batch is not None else None

    def shared(self, batch: Batch | None) -> Batch:
        """The batch on every rank of the replica."""
        return share(batch, self.job, self.job.replica_batch(self.place.data_size), self.part)


class TensorReplica(SharedReplica):
    """One rank's part of a live replica.

    splits: how the split parameters are cut, by name; unsplit: the other parameters, which every rank has
    """

    def __init__(
        self,
        job: Job,
        model: nn.Sequential,
        part: Part,
        splits: Splits,
        facts: Mapping[str, Any],
        place: Place,
        dp_group: dist.ProcessGroup | None,
    ) -> None:
        self.part, self.splits = part, splits
        named = dict(model.named_parameters())
        self.unsplit = [parameter for name, parameter in named.items() if name not in splits]
        # The norm for clipping counts each number once: part 0 counts what every rank has.
        counted = [parameter for name, parameter in named.items() if name in splits or part.rank == 0]
        clip = partial(clip_parts, counted=counted, group=part.group)
        wrapped = None
        if dp_group is not None:  # each part averages its gradients over its copies in the other replicas
            wrapped = in_ddp(model, job.reduce_dtype, dp_group, gradient_as_bucket_view=True)
        update = Update(job.optimizer(named.items()), job, part.group, clip)
        super().__init__(
            job, model, update, facts,
            trained=wrapped, dp_group=dp_group, place=place, saved_part=f"tensor{part.rank}",
        )  # fmt: skip

    def complete_gradients(self) -> None:
        """With sequence parallelism each rank has the gradients of its tokens; split parameters see all of them."""
        if self.part.sequence:
            gradients = [gradient(parameter) for parameter in self.unsplit]
            assert self.part.group is not None, "several ranks share the layers"
            average(gradients, self.part.group)
            for tensor in gradients:
                tensor *= self.part.size

    def output(self, inputs: Tensor) -> Tensor:
        """The logits of all classes."""
        return full_logits(self.model(inputs), self.job, self.part)

    def state(self) -> dict[str, Tensor] | None:
        self.synchronize()
        first = self.place.data_rank == 0
        return full_state(cpu_state(self.model), self.splits, self.part) if first else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(local_state(state, self.splits, self.part))
