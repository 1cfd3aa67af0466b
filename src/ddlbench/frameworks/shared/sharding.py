"""FSDP's shards: which blocks of a model are gathered together."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

OFFLOADS_NOTHING = OffloadPolicy()


def shard(
    model: nn.Sequential,
    mesh: DeviceMesh,
    reshard: bool | None,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy = OFFLOADS_NOTHING,
) -> None:
    """A group of parameters for each named block that is no part of the root's group."""
    kept = root_group(model)
    blocks = [block for name, block in model.named_children() if name not in kept]
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
