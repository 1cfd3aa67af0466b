"""BatchNorm's statistics over replicas."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ddlbench.frameworks.shared.batchnorm import average_statistics
from tests.support.ranks import run_ranks


def averaged() -> tuple[float, float]:
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(dist.get_rank() + 1.0)  # pyright: ignore
    norm.running_var.fill_(10.0 * dist.get_rank())  # pyright: ignore
    assert dist.group.WORLD is not None
    average_statistics(nn.Sequential(norm), dist.group.WORLD)
    return norm.running_mean.item(), norm.running_var.item()  # pyright: ignore


def test_statistics_are_averaged_over_ranks() -> None:
    assert run_ranks(2, averaged) == [(1.5, 5.0), (1.5, 5.0)]
