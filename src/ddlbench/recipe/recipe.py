"""How a model is trained, whichever framework does it: optimizer, learning-rate schedule, label smoothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddlbench.errors import UserError, check_values
from ddlbench.recipe.optimizers import OptimizerConfig
from ddlbench.recipe.schedules import ScheduleConfig, curves


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
