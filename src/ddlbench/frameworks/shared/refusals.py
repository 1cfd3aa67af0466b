"""Refusals that several frameworks share."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.checkpointing import replica_plan
from ddlbench.job import Job, on_meta
from ddlbench.offloading import KEY as OFFLOAD
from ddlbench.recipe.optimizers import optimizers
from ddlbench.recomputation import check_names


def check_alike(job: Job, data_size: int, stages: bool = False, built: bool = False) -> None:
    """Raise for what no framework supports. stages: a rank has some of the blocks, which it checks itself; built: it
    has a replica that `shared.replica.build` makes"""
    job.micro_batches(data_size)
    if job.offload_activations and not built:
        raise Unsupported(
            f"{OFFLOAD}={job.offload_activations} needs a full replica on each rank, without stages and shared layers: "
            f"set {OFFLOAD}=none, or use single, ddp, fsdp, horovod, local_sgd or ZeRO's stages 0 to 2"
        )
    asked = {"checkpoint_activations": job.checkpoint_activations, "offload_activations": job.offload_activations}
    key = next((key for key, choice in asked.items() if choice), None)
    if key is None:
        return
    check_names(job.checkpoint_activations, [name for name, _ in on_meta(job).named_children()])
    if job.compile:
        reason = (
            "what keeps BatchNorm's statistics unchanged in the recomputed forward pass"
            if job.checkpoint_activations
            else "the hooks that copy what autograd saves"
        )
        raise Unsupported(
            f"train.compile and train.{key} cannot be combined (torch.compile does not support {reason}): set one of "
            "them to false"
        )
    if not stages:
        replica_plan(job, data_size)  # a budget may be too small


def check_reduction(name: str, job: Job, dtype: str | None = None) -> None:
    """dtype: the type in which gradients are summed; None: train.reduce_dtype"""
    if (dtype or job.reduce_dtype) == "bf16" and job.device.type != "cuda":
        raise Unsupported(f"{name}: gradients in bf16 need NCCL (gloo cannot sum them): use fp16 or fp32 on CPU")


def optimizer_of(job: Job) -> Optimizer:
    """The job's optimizer over one weight, from which its type and options are read: the job holds no recipe."""
    return job.optimizer([("weight", nn.Parameter(torch.zeros(1, 1)))])


def layerwise(job: Job) -> tuple[str, str | None, str]:
    """The class of the job's optimizer, what it needs of full layers (None: nothing), and the optimizers that need
    nothing of them."""
    name = type(optimizer_of(job)).__name__
    elementwise = " or ".join(other for other, entry in optimizers.items() if not entry.needs)
    return name, optimizers[name.lower()].needs, elementwise


def check_shards(name: str, job: Job) -> None:
    optimizer = optimizer_of(job)
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"]:
        raise Unsupported(f"{name}: torch's fused SGD does not support shards: set recipe.optimizer.fused=null")
