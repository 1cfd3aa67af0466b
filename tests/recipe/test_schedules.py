"""Learning rates and cross-entropy computed by hand; see recipe/recipe.py."""

from __future__ import annotations

import math

import pytest
import torch

from ddlbench.recipe.optimizers import OptimizerConfig
from ddlbench.recipe.recipe import CrossEntropy, Rates, Recipe, ScheduleConfig, learning_rate

STEPS = 10  # an epoch


def rates_at(epochs, schedule, lr=0.1, base_batch=None, global_batch=256, of=90):
    recipe = Recipe("test", OptimizerConfig("sgd", lr, lr_base_batch=base_batch), schedule)
    rate = learning_rate(recipe, global_batch, STEPS, of)
    return [rate(round(epoch * STEPS)) for epoch in epochs]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleConfig(), {0: 0.1, 45: 0.1, 89.9: 0.1}),
        (
            ScheduleConfig("step", milestones=[30, 60, 80], gamma=0.1),
            {0: 0.1, 29.9: 0.1, 30: 0.01, 59.9: 0.01, 60: 1e-3, 79.9: 1e-3, 80: 1e-4, 89.9: 1e-4},
        ),
        (  # milestones are epochs of the training, not of the decay
            ScheduleConfig("step", milestones=[2, 30], gamma=0.1, warmup_epochs=4, warmup_start_factor=0.5),
            {3: 0.0875, 4: 0.01, 29.9: 0.01, 30: 0.001},
        ),
        (  # 0.02 + 0.04 (1 + cos(t pi / 90)): cos 0, 60, 90, 120 degrees = 1, 1/2, 0, -1/2
            ScheduleConfig("cosine", min_lr=0.02),
            {0: 0.1, 30: 0.08, 45: 0.06, 60: 0.04, 89.9: 0.02 + 0.04 * (1 + math.cos(89.9 / 90 * math.pi)), 90: 0.02},
        ),
        (
            ScheduleConfig("exponential", gamma=0.95),
            {0: 0.1, 0.5: 0.1 * math.sqrt(0.95), 1: 0.095, 2: 0.09025, 89: 0.1 * 0.95**89},
        ),
        (
            ScheduleConfig(warmup_epochs=5, warmup_steps=4, warmup_start_factor=0.2),  # steps win over epochs
            {0: 0.02, 0.1: 0.04, 0.2: 0.06, 0.3: 0.08, 0.4: 0.1, 0.5: 0.1},
        ),
        (ScheduleConfig(warmup_epochs=5, warmup_steps=0), {0: 0.1}),
    ],
)
def test_rates_of_90_epochs_by_hand(schedule, expected):
    """cosine and exponential: equations 1 and 2 of Aach et al."""
    assert rates_at(expected, schedule) == pytest.approx([*expected.values()])


def test_decay_begins_after_the_warmup():
    """LR_max of the papers' equations is the largest rate of the run, and min_lr is the rate at its end."""
    schedule = ScheduleConfig("exponential", gamma=0.95, warmup_epochs=4, warmup_start_factor=0.5)
    assert rates_at([0, 2, 4, 5, 6], schedule) == pytest.approx([0.05, 0.075, 0.1, 0.095, 0.09025])
    schedule = ScheduleConfig("cosine", min_lr=0.02, warmup_epochs=30, warmup_start_factor=0.5)
    # 60 epochs of decay: 60 degrees after 20 of them, 90 after 30, 120 after 40
    rates = rates_at([0, 15, 30, 50, 60, 70, 90], schedule)
    assert rates == pytest.approx([0.05, 0.075, 0.1, 0.08, 0.06, 0.04, 0.02])


def test_a_warmup_longer_than_the_run_stays_below_the_peak():
    schedule = ScheduleConfig("cosine", warmup_epochs=4, warmup_start_factor=0.2)
    assert rates_at([0, 1], schedule, of=2) == pytest.approx([0.02, (0.2 + 0.8 / 4) * 0.1])


@pytest.mark.parametrize(
    ("schedule", "lr", "base_batch", "global_batch", "expected"),
    [
        (ScheduleConfig("cosine", min_lr=0.02), 0.1, 256, 8192, {0: 3.2, 90: 0.64}),
        (ScheduleConfig("cosine", min_lr=0.02), 0.1, 256, 64, {0: 0.025, 90: 0.005}),
        (ScheduleConfig(), 0.025, 64, 64 * 1024, {0: 25.6}),  # Aach et al.: 1,024 workers with 64 samples each
        (  # from the unscaled 0.1 to 0.8, in a line
            ScheduleConfig("step", milestones=[30], gamma=0.1, warmup_epochs=5), 0.1, 256, 2048,
            {0: 0.1, 0.1: 0.114, 2.5: 0.45, 5: 0.8, 29.9: 0.8, 30: 0.08},
        ),
        (ScheduleConfig(warmup_epochs=1), 0.1, 256, 64, {0: 0.025, 0.5: 0.025, 1: 0.025}),  # never above the peak
    ],
)  # fmt: skip
def test_rates_scale_with_the_global_batch(schedule, lr, base_batch, global_batch, expected):
    assert rates_at(expected, schedule, lr, base_batch, global_batch) == pytest.approx([*expected.values()])


def a_tenth(step: int) -> float:
    return step / 10


def test_first_and_last_rate_of_a_run_of_some_steps() -> None:
    rates = Rates(a_tenth)
    assert (rates.first, rates.last) == (None, None)
    assert [rates.used(rates.of_step(rates.step)) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]
    assert (rates.step, rates.first, rates.last) == (4, 0.0, 0.3)


def test_the_optimizers_rate_counts_not_the_schedules() -> None:
    rates = Rates(a_tenth)
    rates.used(0.7)
    assert (rates.first, rates.last, rates.of_step(rates.step)) == (0.7, 0.7, 0.1)


def test_a_checkpoint_keeps_all_but_the_schedule() -> None:
    saved, resumed = Rates(a_tenth, step=4, first=0.0, last=0.3), Rates(a_tenth)
    resumed.load(saved.state())
    assert resumed == saved
    assert resumed.used(resumed.of_step(resumed.step)) == 0.4


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
