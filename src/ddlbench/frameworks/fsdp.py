"""FSDP2 (torch.distributed.fsdp.fully_shard): every rank keeps a slice of each parameter, its gradient and its
optimizer state; the full weights of a block are gathered when it runs, its gradients are reduce-scattered.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel"; ZeRO stage 3 of Rajbhandari et al.
2020. With several replicas (hybrid sharding, HSDP) only neighbours share the slices, and gradients are also all-reduced
between the replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ddlbench.errors import WrongRankCount, added, check_values, refuse
from ddlbench.frameworks.shared.groups import all_ranks, batch_norms, subgroup
from ddlbench.frameworks.shared.layout import Layout, divisors
from ddlbench.frameworks.shared.refusals import check_alike, check_reduction, check_shards
from ddlbench.frameworks.shared.replica import Replica, Update, build
from ddlbench.job import Job, on_meta, type_of_dtype

SCHEMES = ("autocast", "policy")


@dataclass
class FSDP:
    """The knobs of fully_shard; conf/framework/fsdp.yaml says what each means."""

    name: str = "fsdp"
    reshard_after_forward: bool | None = None
    replicate: int = 1
    mixed_precision: str | None = None
    offload_parameters: bool = added(False)

    def __post_init__(self) -> None:
        check_values("framework.", self, least={"replicate": 1}, choices={"mixed_precision": SCHEMES})

    def check(self, job: Job) -> None:
        if rest := job.world_size % self.replicate:
            nearest = min(divisors(job.world_size), key=lambda count: abs(count - self.replicate))
            raise WrongRankCount(
                f"framework.replicate={self.replicate} does not divide {job.world_size} ranks (rest {rest}): "
                f"choose framework.replicate={nearest}"
            )
        check_reduction("fsdp", job)
        check_shards(self.name, job)
        reasons = {
            f"MixedPrecisionPolicy casts BatchNorm's weights to {job.precision} but not its running statistics, and "
            "its kernels refuse mixed types: set framework.mixed_precision=autocast":
                self.scheme(job) == "policy" and batch_norms(on_meta(job)),
            "train.precision=fp16 with framework.offload_parameters=true: gradients are on the host and the loss scale "
            "is on the device: use train.precision=bf16":
                self.offload_parameters and job.precision == "fp16",
        }  # fmt: skip
        refuse("fsdp", reasons)
        check_alike(job, job.world_size, built=True)

    def scheme(self, job: Job) -> str:
        """Whether FSDP itself casts weights and activations ("policy") or autocast does. By default the policy, because
        a rank then keeps no second, cast copy of the weights from forward to backward, and gathers half the bytes;
        autocast where BatchNorm rules it out."""
        if job.precision == "fp32":
            return "fp32"
        return self.mixed_precision or ("autocast" if batch_norms(on_meta(job)) else "policy")

    def setup(self, job: Job) -> Replica:
        model = build(job)
        if job.channels_last:  # fully_shard needs contiguous weights; the input decides how a convolution runs
            model.to(memory_format=torch.contiguous_format)
        casts = self.scheme(job) == "policy"
        policy = MixedPrecisionPolicy(  # FSDP's default reduces gradients in the type it computes in
            param_dtype=type_of_dtype[job.precision] if casts else None,
            reduce_dtype=type_of_dtype[job.reduce_dtype],
        )
        # Shards, their gradients and the optimizer's state on the host, where the update runs. Its collectives (the
        # norm for clipping) use the CPU's backend of the process group, which every group here has.
        offload = CPUOffloadPolicy(pin_memory=job.device.type != "cpu") if self.offload_parameters else None
        if self.replicate == 1:
            mesh = DeviceMesh(job.device.type, list(range(job.world_size)), mesh_dim_names=("shard",))
        else:  # neighbouring ranks share a replica. A mesh that makes its own groups leaves them torch's timeout
            layout = Layout(dp=self.replicate, tp=job.world_size // self.replicate)  # the parts of a replica: shards
            grid = layout.groups("tp")
            groups = [cast(dist.ProcessGroup, subgroup(of, job, separate=True)) for of in (layout.groups("dp"), grid)]
            mesh = DeviceMesh.from_group(groups, job.device.type, grid, mesh_dim_names=("replicate", "shard"))
        shard(model, mesh, self.reshard_after_forward, policy, offload)
        # What the micro batches run under: no autocast where FSDP casts. The loss scale of fp16 is the update's.
        compute = replace(job, precision="fp32") if casts else job
        update = Update(job.optimizer(model.named_parameters()), job)
        dp_group = all_ranks(job) if self.replicate == 1 or batch_norms(model) else None
        facts = {
            "reshard_after_forward": self.reshard_after_forward,
            "replicas": self.replicate,
            "shards": job.world_size // self.replicate,
            "offload_parameters": self.offload_parameters,
            "precision_scheme": self.scheme(job),
            "reduce_dtype": job.reduce_dtype,
        }
        return Replica(compute, model, update, facts, no_sync=partial(no_sync, model), dp_group=dp_group)


def shard(
    model: nn.Sequential,
    mesh: DeviceMesh,
    reshard: bool | None,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy | None = None,
) -> None:
    """A group of parameters for each named block that is no part of the root's group."""
    kept = root_group(model)
    blocks = [block for name, block in model.named_children() if name not in kept]
    offload = offload or OffloadPolicy()
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)


def root_group(model: nn.Sequential) -> list[str]:
    """Names of the blocks whose parameters stay in the root's group: blocks that share one (the tied embedding and head
    must be in the same group), and blocks that have vectors only (a last norm), because gathering and reducing so
    few numbers separately costs three messages a step."""
    users = Counter(parameter for block in model.children() for parameter in block.parameters())
    return [
        name
        for name, block in model.named_children()
        if any(users[tensor] > 1 for tensor in block.parameters()) or all(t.ndim < 2 for t in block.parameters())
    ]


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Backward passes within it add up full gradients on this rank; a later pass sends them. Torch takes each for the
    last one of a step. Otherwise it keeps the order of its prefetch, and the next pass gathers a block in vain."""
    root = cast(FSDPModule, model)
    root.set_requires_gradient_sync(False)
    yield
    root.set_requires_gradient_sync(True)
