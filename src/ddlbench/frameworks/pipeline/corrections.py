"""What a pipeline that stays full does about old weights (framework.correction), beside PipeDream's stashing.

prediction   A minibatch sees, forward and backward, the weights that are predicted for the time of its update:
             SpecTrain (Chen et al. 2018, arXiv:1809.02839), XPipe (Guan et al. 2019, arXiv:1911.04610). With W(v) the
             weights after v updates, of which s are still to be made before its own, at the rates lr_1 ... lr_s:
                 W^(v + s) = W(v) - (lr_1 + ... + lr_s) step(v)
             SGD: step = the momentum buffer, in which weight decay is; Nesterov's too, because g + m buffer is the
             buffer while g does not change. Adam: step = m^ / (sqrt(v^) + eps); AdamW: + weight decay * W(v).
pipemare     (Yang et al. 2021, arXiv:1910.05124). No weights are stashed: the forward pass sees the newest ones, and
             the backward pass, n updates later, an estimate of what the forward pass saw:
                 u = W(t) - n d(t),   d(t + 1) = g d(t) + (1 - g) (W(t + 1) - W(t)),   g = D^(1/n)        (technique 2)
             A stage that is n updates behind has the learning rate lr / n^p, p = 1 - min(t / K, 1)        (technique 1)
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ddlbench.frameworks.pipeline.weights import Version, Weights
from ddlbench.frameworks.shared.refusals import optimizer_of
from ddlbench.job import Job

CORRECTIONS = ("none", "prediction", "pipemare")


class PredictedWeights(Weights):
    """Versions are predictions in memory of their own, but for those of an empty pipeline."""

    shared = False  # whether a version has the memory of the newest weights

    def version(self, optimizer: Optimizer, rates: Sequence[float]) -> Version:
        if not rates:
            self.shared = True
            return super().version(optimizer, rates)
        groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
        return {
            name: nn.Parameter(predicted(newest, optimizer, groups[id(newest)], sum(rates)))
            for name, newest in self.newest.items()
        }

    def copy_newest(self) -> None:
        if self.shared:
            super().copy_newest()
            self.shared = False


@torch.no_grad()
def predicted(weight: nn.Parameter, optimizer: Optimizer, group: Mapping[str, Any], rates: float) -> Tensor:
    """group: of the weight; rates: the sum of the learning rates of the updates that are to come"""
    state = optimizer.state.get(weight)
    return weight.clone() if not state else weight - rates * step_of(weight, state, group)


def step_of(weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """What the last update subtracted at a learning rate of 1, by the optimizer's own state."""
    if "momentum_buffer" in state:
        return state["momentum_buffer"]
    (beta1, beta2), count = group["betas"], state["step"]
    mean, square = state["exp_avg"] / (1 - beta1**count), state["exp_avg_sq"] / (1 - beta2**count)
    step = mean / (square.sqrt() + group["eps"])
    return step + group["weight_decay"] * weight if group["decoupled_weight_decay"] else step


class UnstashedWeights(Weights):
    """All versions have the memory of the newest weights. A backward pass finds there whatever is there by then.

    Autograd saves weights and views of them, not copies, in fp32, and does not notice writes through `.data`.
    """

    def __init__(self, model: nn.Module, delay: int, decay: float, reschedule_updates: int) -> None:
        """delay: n; decay: D; reschedule_updates: K"""
        super().__init__(model)
        self.delay, self.reschedule_updates = delay, reschedule_updates
        self.follow = 1 - decay ** (1 / delay)  # 1 - g
        self.velocity = {name: torch.zeros_like(weight) for name, weight in self.newest.items()}  # d

    @contextmanager
    def backward(self, age: int) -> Generator[None]:
        newest = {name: weight.data.clone() for name, weight in self.newest.items()} if age else {}
        for name in newest:
            self.newest[name].data.sub_(self.velocity[name], alpha=age)
        yield
        for name, weight in newest.items():
            self.newest[name].data.copy_(weight)

    @contextmanager
    def updating(self, in_flight: bool) -> Generator[None]:
        before = {name: weight.data.clone() for name, weight in self.newest.items()}
        yield
        for name, weight in self.newest.items():
            self.velocity[name].lerp_(weight.data - before[name], self.follow)

    def rate(self, rate: float, updates: int) -> float:
        left = 1 - min(updates / self.reschedule_updates, 1) if self.reschedule_updates else 0
        return rate / self.delay**left

    def state(self) -> dict[str, Tensor]:
        return {f"velocity/{name}": tensor for name, tensor in self.velocity.items()}


def unpredictable(job: Job) -> str | None:
    """Why the job's optimizer has no rule for a prediction; None where it has one."""
    optimizer = optimizer_of(job)
    if type(optimizer) is SGD:
        return None if optimizer.defaults["momentum"] else "without momentum there is no mean gradient to predict with"
    return None if isinstance(optimizer, Adam) else f"there is no rule for {type(optimizer).__name__}"
