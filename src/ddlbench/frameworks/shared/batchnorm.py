"""Means over replicas: of any tensors, and of BatchNorm's running statistics, which replicas keep each for itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel

# BatchNorm's statistics are averaged before validation, not sent at every step. torch 2.14 renamed the switch.
RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if RENAMED else "broadcast_buffers": False}


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def average_statistics(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Running means and variances of BatchNorm averaged over the data ranks, in one all-reduce."""
    buffers = [
        buffer for norm in batch_norms(model) for buffer in (norm.running_mean, norm.running_var) if buffer is not None
    ]
    if buffers and dist.get_world_size(group) > 1:
        average(buffers, group)


class Statistics:
    """BatchNorm's running statistics: replicas keep their own while they train; they are averaged before they are read
    (docs/adr/0001). copies: this rank and those with the same weights in other replicas; None: there is one replica."""

    def __init__(self, model: nn.Module, copies: dist.ProcessGroup | None) -> None:
        self.model, self.copies, self.synchronized = model, copies, True

    def mark_changed(self) -> None:
        self.synchronized = False

    def synchronize(self) -> None:
        if not self.synchronized and self.copies is not None:
            average_statistics(self.model, self.copies)
        self.synchronized = True


def average(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Each tensor becomes its mean over the ranks of the group; one all-reduce for all of them."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))
