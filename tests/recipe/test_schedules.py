"""Learning rates and cross-entropy computed by hand; see recipe/recipe.py."""

from __future__ import annotations

import math

import pytest
import torch

from ddlbench.errors import UserError
from ddlbench.recipe.optimizers import OptimizerConfig
from ddlbench.recipe.recipe import CrossEntropy, Rates, Recipe, ScheduleConfig, learning_rate

STEPS = 10  # an epoch


def rates(schedule, lr=0.1, base_batch=None, global_batch=256, epochs=90):
    recipe = Recipe("test", OptimizerConfig("sgd", lr, lr_base_batch=base_batch), schedule)
    return learning_rate(recipe, global_batch, STEPS, epochs)


def at(rate, *epochs):
    return [rate(round(epoch * STEPS)) for epoch in epochs]


def test_constant():
    assert at(rates(ScheduleConfig()), 0, 45, 89.9) == [0.1, 0.1, 0.1]


def test_step_falls_at_each_milestone():
    rate = rates(ScheduleConfig("step", milestones=[30, 60, 80], gamma=0.1))
    expected = [0.1, 0.1, 0.01, 0.01, 0.001, 0.001, 0.0001, 0.0001]
    assert at(rate, 0, 29.9, 30, 59.9, 60, 79.9, 80, 89.9) == pytest.approx(expected)


def test_cosine_is_equation_1():
    rate = rates(ScheduleConfig("cosine", min_lr=0.02))
    # 0.02 + 0.04 (1 + cos(t pi / 90)): cos 0, 60, 90, 120 degrees = 1, 1/2, 0, -1/2
    assert at(rate, 0, 30, 45, 60, 90) == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])
    assert rate(899) == pytest.approx(0.02 + 0.04 * (1 + math.cos(89.9 / 90 * math.pi)))


def test_exponential_is_equation_2():
    rate = rates(ScheduleConfig("exponential", gamma=0.95))
    assert at(rate, 0, 1, 2, 89) == pytest.approx([0.1, 0.095, 0.09025, 0.1 * 0.95**89])
    assert rate(5) == pytest.approx(0.1 * math.sqrt(0.95))  # within an epoch


def test_linear_scaling_with_the_global_batch():
    schedule = ScheduleConfig("cosine", min_lr=0.02)
    assert at(rates(schedule, base_batch=256, global_batch=8192), 0, 90) == pytest.approx([3.2, 0.64])
    assert at(rates(schedule, base_batch=256, global_batch=64), 0, 90) == pytest.approx([0.025, 0.005])
    # Aach et al.: 0.025 times the number of workers with 64 samples each
    assert rates(ScheduleConfig(), lr=0.025, base_batch=64, global_batch=64 * 1024)(0) == pytest.approx(25.6)


def test_warmup_rises_on_a_line_from_the_unscaled_rate():
    schedule = ScheduleConfig("step", milestones=[30], gamma=0.1, warmup_epochs=5)
    rate = rates(schedule, base_batch=256, global_batch=2048)  # 0.1 -> 0.8 in 50 updates
    assert [rate(0), rate(1), rate(25), rate(50), rate(299), rate(300)] == pytest.approx(
        [0.1, 0.114, 0.45, 0.8, 0.8, 0.08]
    )


def test_decay_begins_after_the_warmup():
    """LR_max of the papers' equations is the largest rate of the run, and min_lr is the rate at its end."""
    rate = rates(ScheduleConfig("exponential", gamma=0.95, warmup_epochs=4, warmup_start_factor=0.5))
    assert at(rate, 0, 2, 4, 5, 6) == pytest.approx([0.05, 0.075, 0.1, 0.095, 0.09025])
    rate = rates(ScheduleConfig("cosine", min_lr=0.02, warmup_epochs=30, warmup_start_factor=0.5))
    # 60 epochs of decay: 60 degrees after 20 of them, 90 after 30, 120 after 40
    assert at(rate, 0, 15, 30, 50, 60, 70, 90) == pytest.approx([0.05, 0.075, 0.1, 0.08, 0.06, 0.04, 0.02])


def test_milestones_are_epochs_of_the_training():
    rate = rates(ScheduleConfig("step", milestones=[2, 30], gamma=0.1, warmup_epochs=4, warmup_start_factor=0.5))
    assert at(rate, 3, 4, 29.9, 30) == pytest.approx([0.0875, 0.01, 0.01, 0.001])


def test_warmup_steps_win_over_epochs():
    schedule = ScheduleConfig(warmup_epochs=5, warmup_steps=4, warmup_start_factor=0.2)
    rate = rates(schedule)
    assert [rate(update) for update in range(6)] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
    assert rates(ScheduleConfig(warmup_epochs=5, warmup_steps=0))(0) == 0.1


def test_warmup_never_starts_above_the_peak():
    rate = rates(ScheduleConfig(warmup_epochs=1), base_batch=256, global_batch=64)
    assert at(rate, 0, 0.5, 1) == pytest.approx([0.025, 0.025, 0.025])


def test_warmup_longer_than_the_run():
    rate = rates(ScheduleConfig("cosine", warmup_epochs=4, warmup_start_factor=0.2), epochs=2)
    assert at(rate, 0, 1) == pytest.approx([0.02, (0.2 + 0.8 / 4) * 0.1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "cosin"), ("milestones", [60, 30]), ("milestones", [-1]), ("gamma", 0.0), ("min_lr", -1.0),
        ("warmup_epochs", -1.0), ("warmup_steps", -1), ("warmup_start_factor", 0.0),
    ],
)  # fmt: skip
def test_wrong_values_are_named(key, value):
    with pytest.raises(UserError) as error:
        ScheduleConfig(**{key: value})
    assert f"recipe.schedule.{key}={value} must be" in str(error.value)


def a_tenth(step: int) -> float:
    return step / 10


def test_first_and_last_rate_of_a_run_of_some_steps() -> None:
    rates = Rates(a_tenth)
    assert (rates.first, rates.last) == (None, None)
    assert [rates.used(rates.next) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]
    assert (rates.step, rates.first, rates.last) == (4, 0.0, 0.3)


def test_the_optimizers_rate_counts_not_the_schedules() -> None:
    rates = Rates(a_tenth)
    rates.used(0.7)
    assert (rates.first, rates.last, rates.next) == (0.7, 0.7, 0.1)


def test_a_resumed_run_begins_at_another_step() -> None:
    rates = Rates(a_tenth, step=20)
    assert [rates.used(rates.next) for _ in range(2)] == [2.0, 2.1]
    assert (rates.first, rates.last) == (2.0, 2.1)


def test_a_checkpoint_keeps_all_but_the_schedule() -> None:
    saved, resumed = Rates(a_tenth, step=4, first=0.0, last=0.3), Rates(a_tenth)
    assert saved.state().keys() == vars(saved).keys() - {"of_step"}
    resumed.load(saved.state())
    assert resumed == saved


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
