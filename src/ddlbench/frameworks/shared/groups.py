"""Process groups of some of the ranks, and what their ranks compute together: means, the norm of a gradient,
BatchNorm's statistics, the full state of a sharded model, and how old the weights of gradients are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ddlbench.job import Job
from ddlbench.measure.profiling.spans import profiling
from ddlbench.ranks.control import AsyncReduction
from ddlbench.ranks.launch import first_operation, group_timeout


def all_ranks(job: Job) -> dist.ProcessGroup:
    """The group of all ranks. Called on every rank in `setup`, and only by a framework that uses the group on its
    device: the group's communicator exists when this returns (see `subgroup`)."""
    group = dist.group.WORLD
    assert group is not None
    first_operation(job.device, group)
    return group


def subgroup(lists: Sequence[Sequence[int]], job: Job, separate: bool = False) -> dist.ProcessGroup | None:
    """This rank's group of those listed (disjoint lists of ranks), None if it is in none. It is called on every rank
    with the same lists. separate: make a new group even if the list is the whole world, so that messages in it keep no
    order with other messages.

    The group's communicator exists when this returns: NCCL makes it at the group's first operation, which stops the
    host until every member has joined; this must happen at the start and not in a step."""
    if not separate and len(lists) == 1 and len(lists[0]) == job.world_size:
        return all_ranks(job)
    timeout = group_timeout(job.device, job.timeout_s)
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists], timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        return None
    first_operation(job.device, group)
    return group


def average(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Each tensor becomes its mean over the ranks of the group; one all-reduce for all of them, none for no tensors."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    means = zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True)
    torch._foreach_copy_(list(tensors), [mean.view_as(tensor) for tensor, mean in means])  # pyright: ignore


def gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient itself, not a copy; for a sharded parameter this rank's shard."""
    assert parameter.grad is not None
    to_local: Callable[[], Tensor] | None = getattr(parameter.grad, "to_local", None)  # DTensor: a second to import
    return to_local() if to_local else parameter.grad


def clip_parts(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    counted: Iterable[nn.Parameter],
    group: dist.ProcessGroup | None,
) -> None:
    """Clip by the norm of the full gradient, of which each rank of the group has a part (None: this rank has all).
    counted: the parameters whose gradients no other rank counts."""
    gradients = [gradient(parameter) for parameter in parameters]
    norm = nn.utils.get_total_norm([gradient(parameter) for parameter in counted])
    squared = norm.square().to(gradients[0].device)  # the norm of an empty list is on the CPU
    if group is not None:
        dist.all_reduce(squared, group=group)
    shrink = (max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    torch._foreach_mul_(gradients, shrink)  # pyright: ignore


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def average_statistics(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Running means and variances of BatchNorm averaged over the data ranks, in one all-reduce."""
    buffers = (buffer for norm in batch_norms(model) for buffer in (norm.running_mean, norm.running_var))
    average([buffer for buffer in buffers if buffer is not None], group)


def cpu_state(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """A copy of the full tensors on the CPU by name, empty without `keep`. All ranks that have shards call it."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if keep:
            state[name] = full.detach().cpu().clone()
    return state


def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load full tensors, which every rank has, where this rank may have shards; nothing is sent."""
    local = dict(state)
    for name, shard in model.state_dict().items():
        if hasattr(shard, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor  # a second to import

            full, to = state[name].to(shard.device), (shard.device_mesh, shard.placements)
            local[name] = distribute_tensor(full, *to, src_data_rank=None)
    model.load_state_dict(local)


class Staleness:
    """Updates between the weights of a gradient and the weights that it updates: the most on each stage of a pipeline,
    or, where every rank has all weights, on each rank (a stage in the names below)."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages = stage, stages
        self.most: int | None = None  # on this rank's stage, None before its first update
        self.gathered: AsyncReduction | None = None

    def count(self, updates: int) -> None:
        """Count an update of this stage. updates: those made since the weights of its gradient"""
        self.most = max(updates, self.most or 0)

    def gather(self) -> None:
        """At the end of an epoch, on every rank: start to collect; no rank waits for another."""
        if self.most is None or profiling():
            return
        by_stage = torch.zeros(self.stages, dtype=torch.int64)
        by_stage[self.stage] = self.most
        self.gathered = AsyncReduction(by_stage, dist.ReduceOp.MAX)

    def by_stage(self) -> list[int] | None:
        """Over the epochs that have ended; None before the first. Waits until every rank has started to collect."""
        return self.gathered.result() if self.gathered else None
