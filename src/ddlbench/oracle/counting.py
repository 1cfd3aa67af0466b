"""Counts what each block of a model computes, moves and keeps: from the real model, under fake tensors.

Nothing is typed in: the model and the loss run forward and backward at two batch sizes, without data, and every
operation is looked at. What does not grow with the batch (weights) and what does (activations) follow from the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddlbench.job import Model, type_of_dtype
from ddlbench.measure.memory_formula import SPLIT
from ddlbench.oracle.counts import Block, Counts, Exchange, Line, Rows, Work
from ddlbench.oracle.watch import Operation, Watch, kept_bytes
from ddlbench.recipe.losses import make_loss
from ddlbench.run.rehearsal.observed import identity

SAMPLES = (2, 4)  # BatchNorm refuses one value a channel


def count(model: Model, precision: str, device_type: str, smoothing: float = 0.0) -> Counts:
    """Counted once for each model, precision and kind of device."""
    key = replace(cast(Any, model))  # a copy: dataclasses of models may be changed
    return _count(_Key(key, repr(model)), precision, device_type, smoothing)


@dataclass(frozen=True)
class _Key:
    model: Model
    text: str

    def __hash__(self) -> int:
        return hash((type(self.model), self.text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (type(other.model), other.text) == (type(self.model), self.text)


@cache
def _count(key: _Key, precision: str, device_type: str, smoothing: float) -> Counts:
    model = key.model
    small, large = (_run(model, precision, device_type, smoothing, samples) for samples in SAMPLES)
    blocks = [_joined(a, b) for a, b in zip(small, large, strict=True)]
    return Counts(model.name, tuple(blocks), sum(pair.tied for pair in small))


def _line(values: tuple[float, float]) -> Line:
    """Through what was counted at both batch sizes."""
    each = (values[1] - values[0]) / (SAMPLES[1] - SAMPLES[0])
    return Line(values[0] - each * SAMPLES[0], each)


def _work(small: list[Operation], large: list[Operation]) -> Work:
    assert [op.name for op in small] == [op.name for op in large], "the batch size changes what runs"
    bytes_ = [_line((a.bytes_, b.bytes_)) for a, b in zip(small, large, strict=True)]
    return Work(
        np.array([op.flops / SAMPLES[0] for op in small], dtype=float),
        np.array([line.fixed for line in bytes_], dtype=float),
        np.array([line.each for line in bytes_], dtype=float),
        np.array([op.shared for op in small], dtype=bool),
    )


@dataclass
class _Seen:
    """One block at one batch size."""

    name: str
    forward: list[Operation]
    backward: list[Operation]
    kept: float
    leaving: float
    parameters: tuple[int, ...]
    split_parameters: int
    tied: int
    buffers: int
    exchanges: tuple[Exchange, ...]
    rows: tuple[Rows, ...]


def _joined(small: _Seen, large: _Seen) -> Block:
    return Block(
        name=small.name,
        forward=_work(small.forward, large.forward),
        backward=_work(small.backward, large.backward),
        parameters=small.parameters,
        split_parameters=small.split_parameters,
        leaving=small.leaving,
        kept=_line((small.kept, large.kept)),
        buffers=small.buffers,
        exchanges=small.exchanges,
        rows=small.rows,
    )


def _run(model: Model, precision: str, device_type: str, smoothing: float, samples: int) -> list[_Seen]:
    """Every block forward and backward by itself, each fed with the output of the one before."""
    loss = make_loss(smoothing)
    seen: list[_Seen] = []
    text = model.kind == "text"
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fake tensors warn of what they cannot know
        whole = model.build().train()
        if device_type == "cuda":
            _without_attention_dropout(whole)
        value = torch.zeros(samples, *model.input_shape(), dtype=torch.int64 if text else torch.float32)
        targets = torch.zeros((samples, *model.input_shape()) if text else (samples,), dtype=torch.int64)
        known: dict[int, object] = {identity(parameter): parameter for parameter in whole.parameters()}
        counted: set[int] = set()
        blocks = dict(whole.named_children())
        for name, block in blocks.items():
            last = name == list(blocks)[-1]
            watch = Watch(name, block, model.tensor_plan(), samples)
            mixed = torch.autocast("cpu", type_of_dtype[precision], enabled=precision != "fp32")
            with mixed, watch.forward(), kept_bytes(known) as kept:
                output = block(value)
                result = loss(output, targets) if last else output
            gradient = torch.ones_like(result)
            with watch.backward():
                result.backward(gradient)
            seen.append(_seen(name, block, watch, model.tensor_plan(), kept[0], output, samples, counted))
            block.zero_grad()
            value = output.detach().requires_grad_()
    return seen


def _seen(
    name: str,
    block: nn.Module,
    watch: Watch,
    plan: Mapping[str, str],
    kept: float,
    output: Tensor,
    samples: int,
    counted: set[int],
) -> _Seen:
    own = {f"{name}.{key}": parameter for key, parameter in block.named_parameters()}
    new = {key: parameter for key, parameter in own.items() if id(parameter) not in counted}
    split = {f"{module}.{tensor}" for module, style in plan.items() for tensor in SPLIT.get(style, ())}
    counted |= {id(parameter) for parameter in own.values()}
    exchanges = tuple(
        Exchange(module, style, entering / samples, leaving / samples, first)
        for module, style, entering, leaving, first in watch.modules
    )
    return _Seen(
        name=name,
        forward=watch.ahead,
        backward=watch.back,
        kept=kept,
        leaving=output.numel() * output.element_size() / samples,
        parameters=tuple(parameter.numel() for parameter in new.values()),
        split_parameters=sum(parameter.numel() for key, parameter in new.items() if key in split),
        tied=sum(parameter.numel() for key, parameter in own.items() if key not in new),
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in block.buffers()),
        exchanges=exchanges,
        rows=tuple(Rows(module, halo, row / samples, height) for module, halo, row, height in watch.rows),
    )


def _without_attention_dropout(whole: nn.Module) -> None:
    """On GPUs attention stays one fused kernel with dropout, too; on the CPU torch then computes it step by step."""
    for module in whole.modules():
        dropout = getattr(module, "attn_dropout", None)
        if isinstance(dropout, nn.Dropout):
            dropout.p = 0.0
