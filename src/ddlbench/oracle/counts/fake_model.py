"""A model under fake tensors, block by block, as the oracle counts it: without data, with every shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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
from ddlbench.rehearsal.storages import identity


@dataclass
class Feed:
    """Each block gets the output of the block before.

    uncounted: tensors that are not activations: weights, buffers, the batch; saved: storages that autograd has saved
    for an earlier block, and weights
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    value: Tensor
    targets: Tensor
    precision: str
    uncounted: list[Tensor]
    saved: set[int]

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return dict(self.model.named_children())

    def is_last(self, name: str) -> bool:
        return name == list(self.blocks)[-1]

    def mixed(self) -> torch.autocast:
        return torch.autocast("cpu", type_of_dtype[self.precision], enabled=self.precision != "fp32")

    def pass_on(self, output: Tensor) -> None:
        self.value = output.detach().requires_grad_()


@contextmanager
def feed(
    model: Model, precision: str, device_type: str, smoothing: float, samples: int, tp: int, sequence: bool
) -> Generator[Feed]:
    loss: Callable[[Tensor, Tensor], Tensor] = make_loss(smoothing)
    alone = FakeTensorMode() if tp == 1 else fake_world(0, tp, torch.device("cpu"))
    with alone, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fake tensors warn about values that they do not have
        built = model.build().train()
        if tp > 1:
            part = Part(dist.group.WORLD, 0, tp, sequence)
            split_model(built, model.tensor_plan(), part)
            loss = partial(parallel_cross_entropy, classes=model.outputs(), smoothing=smoothing, part=part)
        if device_type == "cuda":
            _without_attention_dropout(built)
        batch = example_batch(model, samples)
        uncounted = [*built.parameters(), *built.buffers(), batch.inputs, batch.targets]
        saved = {identity(tensor) for tensor in (*built.parameters(), batch.inputs)}
        yield Feed(built, loss, batch.inputs, batch.targets, precision, uncounted, saved)


def _without_attention_dropout(model: nn.Module) -> None:
    """Turn off dropout in attention. On GPUs attention stays one fused kernel with dropout; on the CPU torch would
    compute it step by step."""
    for module in model.modules():
        dropout = getattr(module, "attn_dropout", None)
        if isinstance(dropout, nn.Dropout):
            dropout.p = 0.0
