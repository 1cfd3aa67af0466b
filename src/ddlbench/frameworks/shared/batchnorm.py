"""BatchNorm's running statistics: each replica has its own, and their means over replicas are what is reported."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ddlbench.frameworks.shared.groups import average


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def average_statistics(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Running means and variances of BatchNorm averaged over the data ranks, in one all-reduce."""
    buffers = (buffer for norm in batch_norms(model) for buffer in (norm.running_mean, norm.running_var))
    average([buffer for buffer in buffers if buffer is not None], group)


class Statistics:
    """Replicas keep their own statistics while they train; they are averaged before they are read (docs/adr/0001).
    dp_group: this rank and those with the same weights in other replicas; None: there is one replica."""

    def __init__(self, model: nn.Module, dp_group: dist.ProcessGroup | None) -> None:
        self.model, self.dp_group, self.synchronized = model, dp_group, True

    def mark_changed(self) -> None:
        self.synchronized = False

    def synchronize(self) -> None:
        if not self.synchronized and self.dp_group is not None:
            average_statistics(self.model, self.dp_group)
        self.synchronized = True
