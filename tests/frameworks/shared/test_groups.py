"""What ranks compute together: BatchNorm's statistics over replicas, the norm for clipping; the staleness that one rank
counts.

The staleness of two ranks' real steps is in pipeline/test_rank.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddlbench.frameworks.shared.groups import Staleness, average_statistics, clip_parts
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


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_one_rank_clips_as_torch_does(max_norm: float) -> None:
    ours, torchs = ([nn.Parameter(torch.zeros(size)) for size in (3, 5)] for _ in range(2))
    for parameter in (*ours, *torchs):
        parameter.grad = torch.arange(1.0, 1 + len(parameter))
    clip_parts(ours, max_norm, counted=ours, group=None)
    nn.utils.clip_grad_norm_(torchs, max_norm)
    torch.testing.assert_close([weight.grad for weight in ours], [weight.grad for weight in torchs], rtol=0, atol=0)


def test_the_most_of_this_stage_is_known_after_an_epoch() -> None:
    staleness = Staleness(stage=1, stages=3)
    staleness.gather()
    assert staleness.by_stage() is None, "no update was made"
    for updates in (0, 2, 1):
        staleness.count(updates)
    assert staleness.by_stage() is None
    staleness.gather()
    assert staleness.by_stage() == [0, 2, 0]


def test_updates_of_the_newest_weights_are_known_to_be_so() -> None:
    staleness = Staleness(stage=0, stages=1)
    staleness.count(0)
    staleness.gather()
    assert staleness.by_stage() == [0]
