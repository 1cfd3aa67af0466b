"""Several versions of a module's weights: which memory each has, what the module computes with, how old they are.

The staleness is that of one rank; that of two ranks' real steps is in test_clock.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddlbench.frameworks.pipeline.weights import Weights
from ddlbench.frameworks.shared.staleness import Staleness


class Doubled(nn.Module):
    """x -> w x + w x, with one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.other.weight = self.one.weight
        nn.init.constant_(self.one.weight, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


def test_a_version_keeps_its_weights_while_the_newest_move_on() -> None:
    model = Doubled()
    weights = Weights(model)
    optimizer = torch.optim.SGD(weights.newest.values(), lr=1.0)
    old = weights.version(optimizer, [])
    weights.use(old)
    loss = model(torch.ones(1, 1)).square().sum()  # (2 w)^2 = 36

    weights.copy_newest()
    (newest,) = weights.newest.values()
    newest.grad = torch.full_like(newest, 2.0)
    optimizer.step()  # 3 - 2
    loss.backward()
    (stale,) = old.values()
    assert (newest.item(), stale.item()) == (1.0, 3.0)
    assert stale.grad is not None
    assert stale.grad.item() == 24.0  # d (2 w)^2 / dw = 8 w at w = 3

    weights.take_gradients(old)
    optimizer.step()
    assert newest.item() == -23.0
    assert stale.grad is None
    weights.use(weights.newest)
    assert model(torch.ones(1, 1)).item() == -46.0
    assert model.one.weight is model.other.weight is newest


def test_memory_is_shared_until_the_newest_part() -> None:
    weights = Weights(Doubled())
    (newest,) = weights.newest.values()
    optimizer = torch.optim.SGD([newest], lr=1.0)
    (first,), (second,) = (weights.version(optimizer, []).values() for _ in range(2))
    assert first.data_ptr() == second.data_ptr() == newest.data_ptr()
    weights.copy_newest()
    assert first.data_ptr() == second.data_ptr() != newest.data_ptr()


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
