"""Old weights, kept, predicted or corrected; that pipelines train with them by the papers' rules is tested in
tests/equality/test_old_weights.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddlbench.frameworks.pipeline.weights import PredictedWeights, UnstashedWeights, Weights


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

    with weights.updating(old, in_flight=False):
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


class Quadratic(nn.Module):
    """f(w) = a w^2 / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([4.0], dtype=torch.float64))


def test_a_worked_prediction() -> None:
    """Momentum 0.5: after gradients 2 and 3 the buffer is 0.5 * 2 + 3 = 4; two updates at 0.1 and 0.2 are to come."""
    model = Quadratic()
    weights, optimizer = PredictedWeights(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    (before,) = weights.version(optimizer, [0.1]).values()
    assert (before.item(), before.data_ptr() == model.w.data_ptr()) == (4.0, False)
    for gradient in (2.0, 3.0):
        model.w.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
    (after,) = weights.version(optimizer, [0.1, 0.2]).values()
    assert after.item() == pytest.approx(4.0 - 0.1 * (2 + 4) - (0.1 + 0.2) * 4)
    address = model.w.data_ptr()
    weights.copy_newest()
    assert model.w.data_ptr() == address, "no version has the memory of the newest weights"
    weights.version(optimizer, [])
    weights.copy_newest()
    assert model.w.data_ptr() != address


def test_a_worked_correction() -> None:
    """Two updates of -1 and -2, n = 2, D = 0.25, so g = 0.5: d = 0.5 * (0.5 * -1) + 0.5 * -2 = -1.25."""
    model = Quadratic()
    weights = UnstashedWeights(model, delay=2, decay=0.25, reschedule_updates=4)
    for change in (1.0, 2.0):
        with weights.updating(weights.newest, in_flight=True):
            model.w.data -= change
    assert weights.tensors()["velocity/w"].item() == -1.25
    with weights.backward(age=2):
        assert model.w.item() == 1.0 + 2 * 1.25
    assert model.w.item() == 1.0
    assert [weights.rate(0.1, updates) for updates in (0, 2, 4, 9)] == pytest.approx([0.05, 0.1 / 2**0.5, 0.1, 0.1])
    assert UnstashedWeights(model, 2, 0.25, 0).rate(0.1, 0) == 0.1


@pytest.mark.parametrize(
    ("layer", "value"),
    [
        (nn.Linear(3, 2), torch.randn(4, 3)),
        (nn.Conv2d(3, 2, 3), torch.randn(4, 3, 5, 5)),
        (nn.LayerNorm(3), torch.randn(4, 3)),
        (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)),
    ],
    ids=["linear", "convolution", "layer norm", "batch norm"],
)
def test_a_backward_pass_sees_the_corrected_weights(layer: nn.Module, value: Tensor) -> None:
    """A layer is linear in its weight (with the bias it is affine), so the gradient of its input depends on the weight
    that the backward pass sees, and on no other: it is that of a plain pass with this weight."""
    weights = UnstashedWeights(layer, delay=1, decay=0.5, reschedule_updates=0)
    for velocity in weights.velocity.values():
        velocity.normal_()
    upstream = torch.randn(layer(value).shape)
    version = weights.version(torch.optim.SGD(layer.parameters(), lr=0.1), [])
    weights.use(version)
    given = value.clone().requires_grad_()
    output = layer(given)
    with weights.backward(age=1):
        output.backward(upstream)
    plain = value.clone().requires_grad_()
    corrected = {name: weight - weights.velocity[name] for name, weight in weights.newest.items()}
    torch.func.functional_call(layer, corrected, (plain,)).backward(upstream)
    assert given.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(given.grad, plain.grad)
