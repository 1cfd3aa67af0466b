"""FSDP's shards: shard a model, gather its full state, and cut a full state into shards again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Sequential, mesh: DeviceMesh, reshard: bool | None, policy: MixedPrecisionPolicy) -> None:
    """A group of parameters for each named block that is no part of the root's group."""
    kept = root_group(model)
    blocks = [block for name, block in model.named_children() if name not in kept]
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


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


def gathered_state(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """A copy of the full tensors on the CPU, empty without `keep`. All ranks that have shards call it."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            state[name] = gathered.detach().cpu().clone()
    return state


def sharded_like(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shards of full tensors, which every rank has; nothing is sent."""
    shards = model.state_dict()
    return {
        name: distribute_tensor(tensor.to(local.device), local.device_mesh, local.placements, src_data_rank=None)
        if isinstance(local := shards.get(name), DTensor)
        else tensor
        for name, tensor in state.items()
    }
