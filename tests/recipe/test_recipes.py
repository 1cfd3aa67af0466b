"""Every configuration of conf/recipe builds, and the papers' give the papers' numbers; see recipe/recipe.py."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ddlbench.errors import UserError
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from ddlbench.recipe.recipe import Recipe, ScheduleConfig, learning_rate

FOLDER = Path(__file__).parents[2] / "conf" / "recipe"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name, **overrides):
    node: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    assert node.pop("_target_") == "ddlbench.recipe.recipe.Recipe"
    dotted = [f"{key}={value}" for key, value in overrides.items()]
    merged = OmegaConf.merge(OmegaConf.structured(Recipe), node, OmegaConf.from_dotlist(dotted))
    recipe = OmegaConf.to_object(merged)
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.mark.parametrize("name", NAMES)
def test_each_builds_and_trains(name):
    recipe = load(name)
    assert recipe.name == name
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = make_optimizer(recipe.optimizer, model.named_parameters())
    rate = learning_rate(recipe, global_batch=64, steps_per_epoch=3, epochs=2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = rate(0)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    assert all(0 < rate(update) <= recipe.optimizer.lr for update in range(6))
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_each_lists_every_key(name):
    node = OmegaConf.load(FOLDER / f"{name}.yaml")
    assert set(node) == {field.name for field in fields(Recipe)} | {"_target_"}
    assert set(node.optimizer) == {field.name for field in fields(OptimizerConfig)}
    assert set(node.schedule) == {field.name for field in fields(ScheduleConfig)}


@pytest.mark.parametrize(
    ("name", "global_batch", "expected"),
    [
        # 1,024 workers of 64: 1,024 x 0.025 = 25.6 after five epochs of warm-up from 0.025
        ("aach2023_step", 65_536, {0: 0.025, 5: 25.6, 30: 2.56, 60: 0.256, 80: 0.0256}),
        ("aach2023_cosine", 65_536, {0: 0.025, 5: 25.6, 47.5: 12.8, 90: 0.0}),
        ("aach2023_exponential", 65_536, {0: 0.025, 5: 25.6, 6: 24.32, 80: 25.6 * 0.95**75}),
        ("goyal2017", 8192, {0: 0.1, 2.5: 1.65, 5: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032}),
        ("lin2022_vgg", 64 * 64, {0: 0.01, 89: 0.01}),
        ("lin2022_resnet", 128 * 64, {0: 5.0, 89: 5.0}),
        ("lin2022_gpt2", 32 * 64, {0: 1e-3, 89: 1e-3}),
        ("lin2022_zero", 32 * 64, {0: 1e-3, 89: 1e-3}),
        ("sgd", 512, {0: 0.2, 30: 0.15, 45: 0.1}),
        ("adamw", 512, {0: 3e-4, 45: 1.65e-4}),
    ],
)
def test_learning_rates_over_90_epochs(name, global_batch, expected):
    rate = learning_rate(load(name), global_batch, steps_per_epoch=20, epochs=90)
    assert {epoch: rate(round(epoch * 20)) for epoch in expected} == pytest.approx(expected)


def test_optimizers_of_the_papers():
    names = {"vgg": ("sgd", 1e-4), "resnet": ("lars", 1e-4), "gpt2": ("lamb", 0.01), "zero": ("adam", 0.01)}
    for name, expected in names.items():
        optimizer = load(f"lin2022_{name}").optimizer
        assert (optimizer.name, optimizer.weight_decay) == expected
    goyal = load("goyal2017").optimizer  # section 5.1
    assert (goyal.name, goyal.weight_decay, goyal.momentum, goyal.nesterov) == ("sgd", 1e-4, 0.9, True)
    assert not goyal.decay_norm_and_bias


def test_values_that_exclude_each_other_are_one_line_with_the_remedy():
    with pytest.raises(UserError, match=r"recipe\.schedule\.min_lr=3e-05 is above recipe\.optimizer\.lr=1e-05: lower"):
        load("adamw", **{"optimizer.lr": 1e-5})
    with pytest.raises(UserError, match=r"set recipe\.schedule\.warmup_start_factor"):
        load("lin2022_vgg", **{"schedule.warmup_epochs": 5})
    with pytest.raises(UserError, match=r"fused=True must be false with recipe\.optimizer\.name=lamb"):
        load("lamb", **{"optimizer.fused": True})
    assert load("lamb", **{"optimizer.fused": False}).optimizer.fused is False
    with pytest.raises(UserError, match=r"recipe\.label_smoothing=1\.0 must be"):
        load("sgd", label_smoothing=1.0)


WRONG: dict[Any, list[tuple[str, Any]]] = {
    OptimizerConfig: [
        ("name", "sgdd"), ("lr", 0.0), ("lr_base_batch", 0), ("momentum", 1.0), ("betas", [0.9]), ("betas", [0.9, 1.0]),
        ("eps", -1e-8), ("weight_decay", -0.1), ("trust_coefficient", 0.0), ("nesterov", True),
    ],
    ScheduleConfig: [
        ("name", "cosin"), ("milestones", [60, 30]), ("milestones", [-1]), ("gamma", 0.0), ("min_lr", -1.0),
        ("warmup_epochs", -1.0), ("warmup_steps", -1), ("warmup_start_factor", 0.0),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "key", "value"), [(config, *wrong) for config, values in WRONG.items() for wrong in values]
)
def test_wrong_values_are_named(config, key, value):
    right = {"name": "sgd", "lr": 0.1} if config is OptimizerConfig else {}
    with pytest.raises(UserError) as error:
        config(**{**right, key: value})
    part = "optimizer" if config is OptimizerConfig else "schedule"
    assert f"recipe.{part}.{key}={value} must be" in str(error.value)
