"""Spatial parallelism: sp ranks share the rows of every image, dp such groups are replicas.

Dryden et al. 2019; Kahira et al. 2021. Every rank has all weights; frameworks/spatial/layers.py makes the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ddlbench.errors import Unsupported, check_values, refuse
from ddlbench.frameworks.shared.checkpointing import apply_plan
from ddlbench.frameworks.shared.groups import all_ranks, gradient
from ddlbench.frameworks.shared.layout import Layout, divisors, fill
from ddlbench.frameworks.shared.refusals import check_alike, check_reduction
from ddlbench.frameworks.shared.replica import Update, in_ddp
from ddlbench.frameworks.spatial.layers import rows_of, share_rows, windows
from ddlbench.frameworks.tensor.adapter import NO_COMPILE, SharedReplica
from ddlbench.frameworks.tensor.collectives import connect_parts
from ddlbench.job import Batch, Job
from ddlbench.recomputation import KEY, budgeted


@dataclass
class Spatial:
    """dp x sp ranks, neighbours sharing the images of a replica; conf/framework/spatial.yaml explains the knobs."""

    name: str = "spatial"
    dp: int | None = 1
    sp: int | None = None

    def __post_init__(self) -> None:
        check_values("framework.", self, least={"dp": 1, "sp": 1})

    def layout(self, world_size: int) -> Layout:
        """Parts of the images in the place of parts of the layers."""
        dp, sp = fill(world_size, dp=self.dp, sp=self.sp).values()
        return Layout(dp=dp, tp=sp)

    def check(self, job: Job) -> None:
        layout = self.layout(job.world_size)
        if job.model.kind != "images":
            raise Unsupported(f"spatial: {job.model.name} has no image to split: choose framework=tensor")
        rows = {name: window.output for name, window in windows(job.model).items()}
        layer = min(rows, key=rows.__getitem__)
        most = rows[layer]
        fits = max(number for number in divisors(job.world_size) if number <= most)
        reasons = {
            f"{layout.tp} ranks cannot share the {most} rows of {layer}: choose framework.sp={fits} "
            f"framework.dp={job.world_size // fits}":
                layout.tp > most,
            f"a budget counts complete images, which {layout.tp} ranks share: set {KEY}=every:2, for example":
                layout.tp > 1 and budgeted(job.checkpoint_activations),
            NO_COMPILE: job.compile,
        }  # fmt: skip
        refuse("spatial", reasons)
        check_reduction("spatial", job)
        check_alike(job, layout.dp)

    def setup(self, job: Job) -> SpatialReplica:
        layout = self.layout(job.world_size)
        # A separate group, because DDP sends gradients among all ranks at the same time.
        part, place, _ = mesh = connect_parts(job, layout, "sp", separate=True)
        model, several = job.build(), job.world_size > 1
        shared = share_rows(model, windows(job.model), part) if part.size > 1 else []
        apply_plan(model, job, place.data_size)
        # DDP's mean over all ranks is right for complete gradients, and `complete_gradients` makes sums of the others.
        wrapped = in_ddp(model, job.reduce_dtype, all_ranks(job), gradient_as_bucket_view=True) if several else None
        update = Update(job.optimizer(model.named_parameters()), job)
        facts = {"dp": layout.dp, "sp": layout.tp, "reduce_dtype": job.reduce_dtype if several else "fp32"}
        return SpatialReplica(shared, mesh, job, model, update, facts, trained=wrapped)


class SpatialReplica(SharedReplica):
    """One rank's part of the images of a live replica."""

    def __init__(self, shared: list[nn.Parameter], *args: Any, **options: Any) -> None:
        """shared: as `share_rows` returns them; args, options: of `SharedReplica`"""
        self.shared_parameters = shared
        super().__init__(*args, **options)

    def complete_gradients(self) -> None:
        """Not a factor of the loss: gradients of fp16 would overflow earlier than with complete images."""
        if self.shared_parameters:
            gradients = [gradient(parameter) for parameter in self.shared_parameters]
            torch._foreach_mul_(gradients, self.part.size)  # pyright: ignore

    def shared(self, batch: Batch | None) -> Batch:
        """This rank's rows of all images of the replica."""
        complete = super().shared(batch)
        return replace(complete, inputs=rows_of(complete.inputs, self.part))
