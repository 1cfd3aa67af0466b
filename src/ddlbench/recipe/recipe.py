"""How a model is trained, whichever framework does it: optimizer, learning-rate schedule and loss; and the rates that a
run used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ddlbench.errors import UserError, check_values
from ddlbench.recipe.optimizers import OptimizerConfig


@dataclass
class ScheduleConfig:
    """Keys of `recipe.schedule`.

    milestones: step only: epochs at which the learning rate is multiplied by gamma
    gamma: step: factor at each milestone; exponential: factor each epoch
    min_lr: cosine only: the learning rate at the end of training, before linear scaling
    warmup_epochs, warmup_steps: length of the linear warm-up; if warmup_steps (updates) is given, it counts alone
    warmup_start_factor: share of the full learning rate that the first update gets; None undoes the linear
        scaling for it (Goyal et al. 2017, section 2.2)
    """

    name: str = "constant"
    milestones: list[float] = field(default_factory=list[float])
    gamma: float = 0.1
    min_lr: float = 0.0
    warmup_epochs: float = 0.0
    warmup_steps: int | None = None
    warmup_start_factor: float | None = None

    def __post_init__(self) -> None:
        factor, ascending = self.warmup_start_factor, self.milestones == sorted(self.milestones)
        from_0_on = min(self.milestones, default=0) >= 0
        check_values(
            "recipe.schedule.", self,
            least={"min_lr": 0, "warmup_epochs": 0, "warmup_steps": 0},
            choices={"name": curves},
            rules={
                "milestones": (ascending and from_0_on, "epochs from 0 on in ascending order"),
                "gamma": (0 < self.gamma <= 1, "above 0 and at most 1"),
                "warmup_start_factor": (factor is None or 0 < factor <= 1, "above 0 and at most 1"),
            },
        )  # fmt: skip


curves: dict[str, Callable[[ScheduleConfig, float, float, float, int], float]] = {
    "constant": lambda config, lr, epoch, warmup, epochs: lr,
    # times gamma at each milestone, an epoch of the training (Aach et al. 2023: 0.1 at epochs 30, 60 and 80)
    "step": lambda config, lr, epoch, *_: lr * config.gamma ** sum(m <= epoch for m in config.milestones),
    # half a cosine from lr after the warm-up to min_lr at the end (Loshchilov and Hutter 2017; Aach et al. 2023,
    # equation 1)
    "cosine": lambda config, lr, epoch, warmup, epochs: (
        config.min_lr + (lr - config.min_lr) * (1 + math.cos(math.pi * ((epoch - warmup) / (epochs - warmup)))) / 2
    ),
    # times gamma every epoch after the warm-up (Aach et al. 2023, equation 2)
    "exponential": lambda config, lr, epoch, warmup, epochs: lr * config.gamma ** (epoch - warmup),
}


@dataclass
class Recipe:
    """Keys of `recipe`. Batch size, epochs, precision and clipping belong to `train`."""

    name: str
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        optimizer, schedule = self.optimizer, self.schedule
        smooths = 0 <= self.label_smoothing < 1
        check_values("recipe.", self, rules={"label_smoothing": (smooths, "at least 0 and below 1")})
        if schedule.name == "cosine" and schedule.min_lr > optimizer.lr:
            raise UserError(
                f"recipe.schedule.min_lr={schedule.min_lr} is above recipe.optimizer.lr={optimizer.lr}: lower min_lr"
            )
        warms_up = schedule.warmup_epochs if schedule.warmup_steps is None else schedule.warmup_steps
        if warms_up and schedule.warmup_start_factor is None and optimizer.lr_base_batch is None:
            raise UserError(
                "recipe.schedule.warmup_start_factor=null starts at the learning rate before linear scaling, but "
                "recipe.optimizer.lr_base_batch=null scales nothing: set recipe.schedule.warmup_start_factor=0.01, say"
            )


def learning_rate(recipe: Recipe, global_batch: int, steps_per_epoch: int, epochs: int) -> Callable[[int], float]:
    """A pure function from the index of an update (from 0) to its learning rate.

    The warm-up is a line that reaches the scaled rate, the largest one of the run: cosine and exponential decay begin
    at its end, so that LR_max of Aach et al. 2023, equations 1 and 2, is reached. The epoch of the curves is
    update / steps_per_epoch: the rate changes with every update and has the papers' values where an epoch begins.
    """
    assert steps_per_epoch > 0
    assert epochs > 0
    config, lr, base = recipe.schedule, recipe.optimizer.lr, recipe.optimizer.lr_base_batch
    scale = 1.0 if base is None else global_batch / base  # k times the batch and the rate: Goyal et al. 2017, 2.1
    updates = config.warmup_epochs * steps_per_epoch if config.warmup_steps is None else config.warmup_steps
    warmup = updates / steps_per_epoch
    start = min(1.0, 1 / scale) if config.warmup_start_factor is None else config.warmup_start_factor

    def rate(update: int) -> float:
        epoch = update / steps_per_epoch
        if epoch < warmup:
            return scale * lr * (start + (1 - start) * epoch / warmup)
        return scale * curves[config.name](config, lr, epoch, warmup, epochs)

    return rate


@dataclass
class Rates:
    """The learning rates that a run really used.

    of_step: a step, counted from 0 over all epochs -> its learning rate
    step: the next one; a resumed run does not begin at 0
    first, last: rates that the optimizer had at the end of a step; None before the first step
    """

    of_step: Callable[[int], float]
    step: int = 0
    first: float | None = None
    last: float | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: with `load` a run continues where this one is."""
        return {"step": self.step, "first": self.first, "last": self.last}

    def load(self, state: Mapping[str, Any]) -> None:
        self.step, self.first, self.last = state["step"], state["first"], state["last"]

    def used(self, rate: float) -> float:
        """A step has ended with this rate in the optimizer."""
        self.step += 1
        self.first, self.last = rate if self.first is None else self.first, rate
        return rate


IGNORED = -100


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of output [B, C] and targets [B], or output [B, T, V] and targets [B, T]: mean nats a scored target.

    Targets of -100 are not scored. Smoothing as in Szegedy et al. 2016, section 7: with weight `label_smoothing`
    the target is the uniform distribution. Computed in float32 whatever the output's type, under autocast too.
    """

    label_smoothing: float

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            output.flatten(0, -2).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )
