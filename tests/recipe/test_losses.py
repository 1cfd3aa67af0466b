"""Cross-entropy computed by hand; see recipe/losses.py."""

from __future__ import annotations

import math

import pytest
import torch

from ddlbench.recipe.losses import CrossEntropy

# softmax of (ln 1, ln 2, ln 5) is (1, 2, 5) / 8
ROW = [0.0, math.log(2), math.log(5)]


def test_images_by_hand():
    loss = CrossEntropy(0.0)(torch.tensor([ROW, ROW]), torch.tensor([0, 2]))
    assert loss.item() == pytest.approx((math.log(8) + math.log(8 / 5)) / 2)


def test_text_counts_scored_targets_only():
    output = torch.tensor([[ROW, ROW], [ROW, ROW]])  # [B=2, T=2, V=3]
    loss = CrossEntropy(0.0)(output, torch.tensor([[0, -100], [1, 2]]))
    assert loss.item() == pytest.approx((math.log(8) + math.log(8 / 2) + math.log(8 / 5)) / 3)


def test_label_smoothing_mixes_in_the_uniform_distribution():
    loss = CrossEntropy(0.3)(torch.tensor([ROW]), torch.tensor([2]))
    uniform = (math.log(8) + math.log(8 / 2) + math.log(8 / 5)) / 3
    assert loss.item() == pytest.approx(0.7 * math.log(8 / 5) + 0.3 * uniform)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_scored_in_float32(dtype, autocast):
    torch.manual_seed(0)
    output, targets = torch.randn(4, 1000).to(dtype), torch.randint(1000, (4,))
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        loss = CrossEntropy(0.1)(output, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == CrossEntropy(0.1)(output.float(), targets).item()


def test_the_gradient_has_the_output_type():
    output = torch.zeros(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    CrossEntropy(0.0)(output, torch.zeros(2, 3, dtype=torch.long)).backward()
    assert output.grad is not None
    assert output.grad.dtype == torch.bfloat16
    assert output.grad[0, 0].tolist() == pytest.approx([-0.75 / 6, 0.25 / 6, 0.25 / 6, 0.25 / 6], rel=1e-2)
