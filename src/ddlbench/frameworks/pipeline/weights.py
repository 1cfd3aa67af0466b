"""The weights of a stage that stays full: the newest ones, and what minibatches in flight see (framework.correction).

none         PipeDream's weight stashing: `Weights`.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.checkpoint import Kept

CORRECTIONS = ("none", "prediction", "pipemare")

Version = Mapping[str, nn.Parameter]  # name in the stage -> weight, whose gradient belongs to this version


class Weights(Kept):
    """Weight stashing (Narayanan et al. 2019, section 3.3): the newest weights, which the optimizer updates, and older
    ones that batches in flight still need.

    Weights are copied when the optimizer would overwrite what a batch in flight needs, not before: with n batches in
    flight there are never more than n + 1 sets, the newest included.
    """

    def __init__(self, model: nn.Module) -> None:
        self.newest: Version = dict(model.named_parameters())
        self.in_use = self.newest
        names = {id(parameter): name for name, parameter in self.newest.items()}
        # Where the module keeps each; a parameter tied within the stage has several places.
        self.places = [
            (module, attribute, names[id(parameter)])
            for module in model.modules()
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def version(self, optimizer: Optimizer, rates: Sequence[float]) -> Version:
        """What a new minibatch sees: the newest weights as they are; `copy_newest` protects them from later updates.

        rates: learning rates of the updates that will be made before the minibatch's own
        """
        return {name: nn.Parameter(newest.data, newest.requires_grad) for name, newest in self.newest.items()}

    def use(self, version: Version) -> None:
        """The module computes with this version from now on: forward, and where it recomputes, backward."""
        if version is not self.in_use:
            for module, attribute, name in self.places:
                setattr(module, attribute, version[name])
            self.in_use = version

    def copy_newest(self) -> None:
        """Copy the newest weights to new memory, before an update that the versions in flight must not see."""
        for newest in self.newest.values():
            newest.data = newest.data.clone()

    def backward(self, age: int) -> AbstractContextManager[object]:
        """Around a backward pass. age: updates made since its minibatch was admitted"""
        return nullcontext()

    @contextmanager
    def updating(self, version: Version, in_flight: bool) -> Generator[None]:
        """Around an update of the newest weights by this version's gradient. in_flight: versions are still needed"""
        if in_flight:
            self.copy_newest()
        for name, newest in self.newest.items():
            newest.grad, version[name].grad = version[name].grad, None
        yield

    def rate(self, rate: float, updates: int) -> float:
        """The learning rate of this stage's update. rate: the loop's; updates: number of updates made before"""
        return rate


class PredictedWeights(Weights):
    """Versions are predictions, each in new memory; those of an empty pipeline share that of the newest weights."""

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
    """The step is what the last update subtracted at a learning rate of 1, by the optimizer's own state.

    group: of the weight; rates: the sum of the learning rates of the updates in between
    """
    state = optimizer.state.get(weight)
    if not state:
        return weight.clone()
    if "momentum_buffer" in state:
        return weight - rates * state["momentum_buffer"]
    (beta1, beta2), count = group["betas"], state["step"]
    mean, square = state["exp_avg"] / (1 - beta1**count), state["exp_avg_sq"] / (1 - beta2**count)
    step = mean / (square.sqrt() + group["eps"])
    return weight - rates * (step + group["weight_decay"] * weight if group["decoupled_weight_decay"] else step)


class UnstashedWeights(Weights):
    """All versions have the memory of the newest weights. A backward pass reads its content at that time.

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
    def updating(self, version: Version, in_flight: bool) -> Generator[None]:
        before = {name: weight.data.clone() for name, weight in self.newest.items()}
        with super().updating(version, in_flight=False):
            yield
        for name, weight in self.newest.items():
            self.velocity[name].lerp_(weight.data - before[name], self.follow)

    def rate(self, rate: float, updates: int) -> float:
        left = 1 - min(updates / self.reschedule_updates, 1) if self.reschedule_updates else 0
        return rate / self.delay**left

    def tensors(self) -> dict[str, Tensor]:
        return {f"velocity/{name}": tensor for name, tensor in self.velocity.items()}
