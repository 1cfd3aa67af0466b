"""FSDP2 (torch.distributed.fsdp.fully_shard): every rank keeps a slice of each parameter, its gradient and its
optimizer state; a block's weights are gathered whole when it runs, its gradients reduce-scattered.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel"; ZeRO stage 3 of Rajbhandari et al.
2020. With several replicas (hybrid sharding, HSDP) slices are shared among neighbours only, and gradients all-reduced
between the replicas besides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ddlbench.errors import Unsupported, UserError
from ddlbench.frameworks.shared.common import Update, check_alike, has_batch_norm, subgroup
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.frameworks.shared.replica import Replica, build
from ddlbench.job import Job, type_of_dtype

SCHEMES = ("autocast", "policy")


@dataclass
class FSDP:
    """The knobs of fully_shard; conf/framework/fsdp.yaml says what each means."""

    name: str = "fsdp"
    reshard_after_forward: bool | None = None
    replicate: int = 1
    mixed_precision: str | None = None

    def __post_init__(self) -> None:
        if self.mixed_precision not in (None, *SCHEMES):
            raise UserError(
                f"framework.mixed_precision={self.mixed_precision} is unknown: choose {' or '.join(SCHEMES)}, or null"
            )
        if self.replicate < 1:
            raise UserError(f"framework.replicate={self.replicate} must be at least 1: 1 shards over all ranks")

    def check(self, job: Job) -> None:
        self._check_replicas(job.world_size)
        if job.reduce_dtype == "bf16" and job.device.type != "cuda":
            raise Unsupported("fsdp: gradients in bf16 need NCCL (gloo cannot sum them): use fp16 or fp32 on CPU")
        check_shards(self.name, job)
        if self._casts(job) and has_batch_norm(job):
            raise Unsupported(
                f"fsdp: MixedPrecisionPolicy casts BatchNorm's weights to {job.precision} but not its running "
                "statistics, which its kernels refuse: set framework.mixed_precision=autocast"
            )
        check_alike(job, job.world_size)

    def _check_replicas(self, world: int) -> None:
        if world % self.replicate:
            fits = [count for count in range(1, world + 1) if world % count == 0]
            nearest = min(fits, key=lambda count: abs(count - self.replicate))
            raise UserError(
                f"framework.replicate={self.replicate} does not divide {world} ranks (rest {world % self.replicate}): "
                f"choose framework.replicate={nearest}"
            )

    def _casts(self, job: Job) -> bool:
        """Whether FSDP itself casts weights and activations, in autocast's place."""
        return self._scheme(job) == "policy"

    def _scheme(self, job: Job) -> str:
        """By default the policy, for a rank then keeps no second, cast copy of the weights from forward to backward,
        and gathers half the bytes; autocast where BatchNorm rules it out."""
        if job.precision == "fp32":
            return "fp32"
        return self.mixed_precision or ("autocast" if has_batch_norm(job) else "policy")

    def setup(self, job: Job) -> Replica:
        model = build(job)
        if job.channels_last:  # fully_shard takes contiguous weights only; channels-last inputs suffice to convolve so
            model.to(memory_format=torch.contiguous_format)
        shard(model, make_mesh(job, self.replicate), self.reshard_after_forward, self._policy(job))
        # What the micro batches run under: no autocast where FSDP casts. The loss scale of fp16 is the update's.
        compute = replace(job, precision="fp32") if self._casts(job) else job
        optimizer = job.optimizer(model.named_parameters())
        return ShardedReplica(
            compute, model, optimizer, self._facts(job),
            update=Update(optimizer, job), no_sync=partial(no_sync, model), dp_group=dist.group.WORLD,
        )  # fmt: skip

    def _policy(self, job: Job) -> MixedPrecisionPolicy:
        """Left alone, FSDP would reduce gradients in the type it computes in."""
        return MixedPrecisionPolicy(
            param_dtype=type_of_dtype[job.precision] if self._casts(job) else None,
            reduce_dtype=type_of_dtype[job.reduce_dtype],
        )

    def _facts(self, job: Job) -> dict[str, Any]:
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "replicas": self.replicate,
            "shards": job.world_size // self.replicate,
            "precision_scheme": self._scheme(job),
            "reduce_dtype": job.reduce_dtype,
        }


class ShardedReplica(Replica):
    """States are gathered, and sharded again."""

    def state(self) -> dict[str, Tensor] | None:
        self.synchronize()
        first = self.job.rank == 0
        whole = gathered_state(self.model, keep=first)
        return whole if first else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(sharded_like(self.model, state))


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """A backward pass that adds up whole gradients on this rank, and leaves the sending to a later one."""
    root = cast(FSDPModule, model)
    root.set_requires_gradient_sync(False)
    root.set_is_last_backward(False)
    yield
    root.set_requires_gradient_sync(True)
    root.set_is_last_backward(True)


def make_mesh(job: Job, replicas: int) -> DeviceMesh:
    """All ranks in a row, or replicas x shards with neighbouring ranks sharing a replica."""
    if replicas == 1:
        return init_device_mesh(job.device.type, (job.world_size,), mesh_dim_names=("shard",))
    layout = Layout(dp=replicas, tp=job.world_size // replicas)  # the shards of a replica are its parts
    # A mesh that makes its own groups leaves them torch's timeout.
    grid = layout.tp_groups()
    groups = [cast(dist.ProcessGroup, subgroup(lists, job, own=True)) for lists in (layout.dp_groups(), grid)]
    return DeviceMesh.from_group(groups, job.device.type, grid, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Sequential, mesh: DeviceMesh, reshard: bool | None, policy: MixedPrecisionPolicy) -> None:
    """A group of parameters a named block. Blocks that share one (the tied embedding and head) must be in the same
    group, so they stay with the root's."""
    users = Counter(parameter for block in model.children() for parameter in block.parameters())
    own = [block for block in model.children() if all(users[parameter] == 1 for parameter in block.parameters())]
    for module in (*own, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def gathered_state(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """A copy of the whole tensors on the CPU; of nothing where they are not kept. Called on all ranks that share."""
    whole: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = gathered.detach().cpu().clone()
    return whole


def sharded_like(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, which every rank has, cut as the model's own are; nothing is sent."""
    own = model.state_dict()
    return {name: _cut(tensor, own.get(name)) for name, tensor in state.items()}


def _cut(tensor: Tensor, own: Tensor | None) -> Tensor:
    if not isinstance(own, DTensor):
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def check_shards(name: str, job: Job) -> None:
    """Asked of an optimizer over a single weight, for the job holds no recipe."""
    optimizer = job.optimizer([("weight", nn.Parameter(torch.zeros(1, 1)))])
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"]:
        raise Unsupported(f"{name}: torch's fused SGD does not know shards: set recipe.optimizer.fused=null")
