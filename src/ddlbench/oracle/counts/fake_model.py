"""A model under fake tensors, block by block, as the oracle counts it: without data, with every shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.frameworks.tensor.layers import split_model
from ddlbench.frameworks.tensor.loss import parallel_cross_entropy
from ddlbench.job import Model, example_batch, type_of_dtype
from ddlbench.ranks.fake.fake import fake_world
from ddlbench.recipe.losses import make_loss
from ddlbench.rehearsal.observed import identity


@dataclass
class Feed:
    """Each block is fed with the output of the one before.

    given: what does not count as living: weights, buffers, targets; known: storages that count elsewhere
    """

    whole: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    value: Tensor
    targets: Tensor
    precision: str
    given: list[Tensor] = field(default_factory=list[Tensor])
    known: set[int] = field(default_factory=set[int])

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return dict(self.whole.named_children())

    def is_last(self, name: str) -> bool:
        return name == list(self.blocks)[-1]

    def mixed(self) -> torch.autocast:
        return torch.autocast("cpu", type_of_dtype[self.precision], enabled=self.precision != "fp32")

    def take(self) -> Tensor:
        """The next block's input, to which only the block refers, as within a complete model: it is freed after its
        last use. A batch, which needs no gradient, stays."""
        if not self.value.requires_grad:
            return self.value
        taken = [self.value.detach()]
        self.value = torch.zeros((), requires_grad=True)
        return cast(Tensor, _Taken.apply(self.value, taken))

    def pass_on(self, output: Tensor) -> None:
        self.value = output.detach().requires_grad_()


class _Taken(torch.autograd.Function):
    """A tensor that needs a gradient and is no leaf, which autograd would refer to until the end."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, taken: list[Tensor]) -> Tensor:
        return taken.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


@contextmanager
def feed(
    model: Model, precision: str, device_type: str, smoothing: float, samples: int, tp: int, sequence: bool
) -> Generator[Feed]:
    loss: Callable[[Tensor, Tensor], Tensor] = make_loss(smoothing)
    alone = FakeTensorMode() if tp == 1 else fake_world(0, tp, torch.device("cpu"))
    with alone, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fake tensors warn of what they cannot know
        built = model.build().train()
        if tp > 1:
            part = Part(dist.group.WORLD, 0, tp, sequence)
            split_model(built, model.tensor_plan(), part)
            loss = partial(parallel_cross_entropy, classes=model.outputs(), smoothing=smoothing, part=part)
        if device_type == "cuda":
            _without_attention_dropout(built)
        batch = example_batch(model, samples)
        stay = [*built.parameters(), *built.buffers(), batch.targets]
        fed = Feed(built, loss, batch.inputs, batch.targets, precision, stay)
        fed.known |= {identity(parameter) for parameter in built.parameters()}
        yield fed


def _without_attention_dropout(model: nn.Module) -> None:
    """Turn off dropout in attention. On GPUs attention stays one fused kernel with dropout; on the CPU torch would
    compute it step by step."""
    for module in model.modules():
        dropout = getattr(module, "attn_dropout", None)
        if isinstance(dropout, nn.Dropout):
            dropout.p = 0.0
