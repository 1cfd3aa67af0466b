"""Refusals that several frameworks share."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.checkpointing import replica_segments
from ddlbench.frameworks.shared.meta import on_meta
from ddlbench.job import Job
from ddlbench.recipe.optimizers import optimizers
from ddlbench.recomputation import check_names


def check_alike(job: Job, data_size: int, stages: bool = False) -> None:
    """Raise for what no framework supports. stages: a rank has some of the blocks, which it checks itself"""
    job.micro_batches(data_size)
    if not job.checkpoint_activations:
        return
    check_names(job.checkpoint_activations, [name for name, _ in on_meta(job).named_children()])
    if job.compile:
        raise Unsupported(
            "train.compile and train.checkpoint_activations cannot be combined (torch.compile does not support what "
            "keeps BatchNorm's statistics unchanged in the recomputed forward pass): set one of them to false"
        )
    if not stages:
        replica_segments(job, data_size)  # a budget may be too small


def check_reduction(name: str, job: Job, dtype: str | None = None) -> None:
    """dtype: the type in which gradients are summed; None: train.reduce_dtype"""
    if (dtype or job.reduce_dtype) == "bf16" and job.device.type != "cuda":
        raise Unsupported(f"{name}: gradients in bf16 need NCCL (gloo cannot sum them): use fp16 or fp32 on CPU")


def optimizer_of(job: Job) -> Optimizer:
    """The job's optimizer over one weight, from which its type and options are read: the job holds no recipe."""
    return job.optimizer([("weight", nn.Parameter(torch.zeros(1, 1)))])


def layerwise(job: Job) -> tuple[str, str | None]:
    """The class of the job's optimizer, and what it needs of full layers; None: nothing."""
    name = type(optimizer_of(job)).__name__
    return name, optimizers[name.lower()].needs


def elementwise_names() -> str:
    return " or ".join(name for name, entry in optimizers.items() if not entry.needs)


def check_shards(name: str, job: Job) -> None:
    optimizer = optimizer_of(job)
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"]:
        raise Unsupported(f"{name}: torch's fused SGD does not support shards: set recipe.optimizer.fused=null")
