"""Single steps computed by hand from the papers' formulas; see recipe/optimizers.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer, optimizers


def matrix(*values):
    """One row: two dimensions, so that it decays and adapts."""
    return nn.Parameter(torch.tensor([values], dtype=torch.float64))


def step(optimizer, parameter, *gradient, lr=None):
    for group in optimizer.param_groups:
        group["lr"] = lr if lr is not None else group["lr"]
    parameter.grad = torch.tensor(gradient, dtype=torch.float64).reshape(parameter.shape)
    optimizer.step()
    return parameter.detach().flatten().tolist()


def test_sgd_with_momentum_and_weight_decay_or_nesterov():
    weight = matrix(1.0)
    sgd = make_optimizer(OptimizerConfig("sgd", lr=0.1, momentum=0.9, weight_decay=0.5), [("w", weight)])
    assert step(sgd, weight, 2.0) == pytest.approx([0.75])  # v = 2 + 0.5; 1 - 0.1 x 2.5
    assert step(sgd, weight, 1.0) == pytest.approx([0.3875])  # v = 0.9 x 2.5 + 1 + 0.375 = 3.625
    weight = matrix(1.0)
    sgd = make_optimizer(OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True), [("w", weight)])
    assert step(sgd, weight, 2.0) == pytest.approx([0.62])  # 1 - 0.1 x (2 + 0.9 x 2)


def test_adam_adds_the_decay_to_the_gradient_and_adamw_to_the_weight():
    shared = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 0.0, "weight_decay": 0.5}
    # The first bias-corrected step is lr times the gradient's sign; the L2 term turns -0.2 into +0.3.
    for name, expected in {"adam": 0.9, "adamw": 1.05}.items():
        weight = matrix(1.0)
        optimizer = make_optimizer(OptimizerConfig(name, **shared), [("w", weight)])
        assert step(optimizer, weight, -0.2) == pytest.approx([expected])


def test_lars_by_hand():
    weight = matrix(3.0, 4.0)
    config = OptimizerConfig("lars", lr=2.0, momentum=0.9, eps=0.0, weight_decay=0.1, trust_coefficient=0.01)
    lars = make_optimizer(config, [("w", weight)])
    # |w| = 5, |g| = 1: ratio 0.01 x 5 / (1 + 0.1 x 5) = 1/30; v = (0.9, 1.2) / 30
    assert step(lars, weight, 0.6, 0.8) == pytest.approx([2.94, 3.92])
    # |w| = 4.9: ratio 0.049 / 1.49; v = 0.9 (0.03, 0.04) + ratio (0.894, 1.192). The whole v moves by the new lr of 1;
    # algorithm 1 of You et al. moves its first part by the old one.
    assert step(lars, weight, 0.6, 0.8, lr=1.0) == pytest.approx([2.94 - 0.0564, 3.92 - 0.0752])


def test_lars_takes_a_plain_step_from_zero():
    weight = matrix(0.0, 0.0)
    lars = make_optimizer(OptimizerConfig("lars", lr=0.5, weight_decay=0.1), [("w", weight)])
    assert step(lars, weight, 1.0, -2.0) == pytest.approx([-0.5, 1.0])


def test_lamb_follows_algorithm_2_without_clipping():
    lr, b1, b2, eps, decay = 0.1, 0.9, 0.99, 1e-3, 0.05
    weight, w, m, v = matrix(3.0, 4.0), [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]
    config = OptimizerConfig("lamb", lr=lr, betas=[b1, b2], eps=eps, weight_decay=decay)
    lamb = make_optimizer(config, [("w", weight)])
    for t, gradient in enumerate([(0.1, -0.2), (30.0, 40.0), (-5.0, 0.3)], start=1):  # clipping to 1 would show
        m = [b1 * a + (1 - b1) * g for a, g in zip(m, gradient, strict=True)]
        v = [b2 * a + (1 - b2) * g * g for a, g in zip(v, gradient, strict=True)]
        hats = [(a / (1 - b1**t), b / (1 - b2**t)) for a, b in zip(m, v, strict=True)]
        u = [a / (math.sqrt(b) + eps) + decay * x for (a, b), x in zip(hats, w, strict=True)]
        w = [x - lr * math.hypot(*w) / math.hypot(*u) * y for x, y in zip(w, u, strict=True)]
        assert step(lamb, weight, *gradient) == pytest.approx(w)


@pytest.mark.parametrize(("name", "moved"), [("lars", 2.0), ("lamb", 1.0), ("sgd", 2.0), ("adamw", 1.0)])
def test_norms_and_biases_can_be_left_out_of_decay_and_adaptation(name, moved):
    weight, bias = matrix(3.0, 4.0), nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    config = OptimizerConfig(name, lr=0.1, eps=0.0, weight_decay=0.5, decay_norm_and_bias=False)
    optimizer = make_optimizer(config, [("w", weight), ("b", bias)])
    weight.grad = torch.zeros_like(weight)
    # Plain SGD moves by lr x gradient, Adam's first step by lr.
    assert step(optimizer, bias, 2.0, 2.0) == pytest.approx([3 - 0.1 * moved, 4 - 0.1 * moved])


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_adaptation_does_not_depend_on_weight_decay(name):
    weight = matrix(3.0, 4.0)
    config = OptimizerConfig(name, lr=0.1, eps=0.0, trust_coefficient=1.0, decay_norm_and_bias=False)
    moved = step(make_optimizer(config, [("w", weight)]), weight, 1.0, 1.0)
    assert math.hypot(3 - moved[0], 4 - moved[1]) == pytest.approx(0.5)  # lr x |w|, whatever the gradient


def test_groups_and_frozen_parameters():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    module[2].weight.requires_grad_(False)
    config = OptimizerConfig("sgd", lr=0.1, weight_decay=0.5, decay_norm_and_bias=False)
    groups = make_optimizer(config, module.named_parameters()).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.5), (4, 0.0)]
    groups = make_optimizer(OptimizerConfig("sgd", lr=0.1, weight_decay=0.5), module.named_parameters()).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(5, 0.5)]


@pytest.mark.parametrize("name", optimizers)
def test_an_entry_has_the_name_of_its_class(name):
    """Refusals find the entry of a job's optimizer by it."""
    made = make_optimizer(OptimizerConfig(name, lr=0.1), [("w", matrix(1.0))])
    assert type(made).__name__.lower() == name


@pytest.mark.parametrize("name", optimizers)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_table_counts_the_states_that_an_update_keeps(name, momentum):
    weight, entry = matrix(3.0, 4.0), optimizers[name]
    optimizer = make_optimizer(OptimizerConfig(name, lr=0.1, momentum=momentum), [("w", weight)])
    step(optimizer, weight, 1.0, 1.0)
    states = [value for value in optimizer.state[weight].values() if getattr(value, "shape", None) == weight.shape]
    expected = entry.costs if momentum or entry.plain is None else entry.plain
    assert len(states) == expected.states


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("fused", [True, False])
def test_fused_is_passed_on(name, fused):
    optimizer = make_optimizer(OptimizerConfig(name, lr=0.1, fused=fused), [("w", matrix(1.0))])
    assert optimizer.param_groups[0]["fused"] is fused
