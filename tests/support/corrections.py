"""The rules of framework.correction, written out for the plain reference (reference.py), without an optimizer's state
and without writing into weights that a backward pass reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tests.support.reference import Rule

MOMENTUM, DECAY = 0.9, 1e-4  # of reference.make_optimizer
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class SpecTrain(Rule):
    """W - sum of rates * v, with v the momentum of SGD."""

    def __init__(self, ages: Mapping[str, int]) -> None:
        self.steps: dict[str, list[Tensor | float]] = {name: [0.0] for name in ages}  # after each update
        self.ages = ages

    def forward(self, name: str, old: Tensor, rates: Sequence[float]) -> Tensor:
        return old - sum(rates) * self.steps[name][-1 - len(rates)]

    def updated(self, name: str, gradient: Tensor, before: Tensor, after: Tensor) -> None:
        self.steps[name].append(MOMENTUM * self.steps[name][-1] + gradient + DECAY * before)


class XPipe(SpecTrain):
    """W - sum of rates * Adam's step; decay of AdamW is in the step."""

    def __init__(self, ages: Mapping[str, int]) -> None:
        super().__init__(ages)
        self.means: dict[str, Tensor | float] = dict.fromkeys(ages, 0.0)
        self.squares: dict[str, Tensor | float] = dict.fromkeys(ages, 0.0)

    def updated(self, name: str, gradient: Tensor, before: Tensor, after: Tensor) -> None:
        self.means[name] = BETA1 * self.means[name] + (1 - BETA1) * gradient
        self.squares[name] = BETA2 * self.squares[name] + (1 - BETA2) * gradient**2
        count = len(self.steps[name])
        root = torch.as_tensor(self.squares[name] / (1 - BETA2**count)).sqrt()
        self.steps[name].append(self.means[name] / (1 - BETA1**count) / (root + EPS) + DECAY * after)


class PipeMare(Rule):
    """decay: D; reschedule: K."""

    def __init__(self, ages: Mapping[str, int], decay: float, reschedule: int) -> None:
        self.ages, self.decay, self.reschedule = ages, decay, reschedule
        self.velocity: dict[str, Tensor | float] = dict.fromkeys(ages, 0.0)
        self.late = dict.fromkeys(ages, 0)  # updates between a minibatch's passes

    def forward(self, name: str, old: Tensor, rates: Sequence[float]) -> Tensor:
        self.late[name] = len(rates)
        return old

    def saved(self, weights: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """Autograd gets another tensor than the weight that the forward pass saved."""
        names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        corrected = {name: newest[name] - self.late[name] * self.velocity[name] for name in weights}

        def pack(tensor: Tensor) -> object:
            name = names.get(tensor.untyped_storage().data_ptr())
            return tensor if name is None else (name, tensor.shape, tensor.stride(), tensor.storage_offset())

        def unpack(packed: object) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            name, *view = packed  # pyright: ignore
            return corrected[name].as_strided(*view)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def rate(self, name: str, rate: float, update: int) -> float:
        power = 1 - min(update / self.reschedule, 1) if self.reschedule else 0
        return rate / max(self.ages[name], 1) ** power

    def updated(self, name: str, gradient: Tensor, before: Tensor, after: Tensor) -> None:
        keep = self.decay ** (1 / self.ages[name]) if self.ages[name] else 0
        self.velocity[name] = keep * self.velocity[name] + (1 - keep) * (after - before)
