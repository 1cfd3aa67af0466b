"""Counts what each block of a model computes, moves and keeps: from the real model, under fake tensors.

Nothing is typed in: the model and the loss run forward and backward at two batch sizes, without data, and every
operation is looked at. What does not grow with the batch (weights) and what does (activations) follow from the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.frameworks.tensor.layers import split_model
from ddlbench.frameworks.tensor.loss import parallel_cross_entropy
from ddlbench.job import Model, type_of_dtype
from ddlbench.measure.memory_formula import SPLIT
from ddlbench.oracle.counts import Block, Counts, Exchange, Line, Moments, Rows, Work
from ddlbench.oracle.living import Living, Passes
from ddlbench.oracle.watch import Operation, Watch, kept_bytes
from ddlbench.ranks.fake import fake_world
from ddlbench.recipe.losses import make_loss
from ddlbench.run.rehearsal.observed import identity, size

SAMPLES = (2, 4)  # BatchNorm refuses one value a channel


def count(
    model: Model, precision: str, device_type: str, smoothing: float = 0.0, tp: int = 1, sequence: bool = False
) -> Counts:
    """Counted once for each model, precision and kind of device. tp: of the part of one of so many ranks that share
    every layer, with sequence parallelism or without."""
    key = replace(cast(Any, model))  # a copy: dataclasses of models may be changed
    return _count(_Key(key, repr(model)), precision, device_type, smoothing, tp, sequence)


@dataclass(frozen=True)
class _Key:
    model: Model
    text: str

    def __hash__(self) -> int:
        return hash((type(self.model), self.text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (type(other.model), other.text) == (type(self.model), self.text)


@cache
def _count(key: _Key, precision: str, device_type: str, smoothing: float, tp: int, sequence: bool) -> Counts:
    model = key.model
    small, large = (_run(model, precision, device_type, smoothing, samples, tp, sequence) for samples in SAMPLES)
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


@dataclass(frozen=True)
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
    entering: float = 0.0
    passes: Passes = field(default_factory=Passes)


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
        entering=small.entering,
        ahead=_moments(small.passes.ahead, large.passes.ahead),
        back=_moments(small.passes.back, large.passes.back),
        added=_moments(small.passes.added, large.passes.added),
    )


def _moments(small: list[float], large: list[float]) -> Moments:
    """Those that are the fullest at some batch size."""
    lines = {_line(pair) for pair in zip(small, large, strict=True)}
    above = [line for line in lines if not any(_covers(other, line) for other in lines - {line})]
    return Moments(tuple(sorted(above, key=lambda line: line.each)))


def _covers(one: Line, other: Line) -> bool:
    return one.each >= other.each and one.at(1) >= other.at(1)


def _run(
    model: Model, precision: str, device_type: str, smoothing: float, samples: int, tp: int, sequence: bool
) -> list[_Seen]:
    """Every block forward and backward by itself, each fed with the output of the one before."""
    loss: Callable[[Tensor, Tensor], Tensor] = make_loss(smoothing)
    seen: list[_Seen] = []
    text = model.kind == "text"
    alone = FakeTensorMode() if tp == 1 else fake_world(0, tp, torch.device("cpu"))
    with alone, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fake tensors warn of what they cannot know
        whole = model.build().train()
        if tp > 1:
            part = Part(dist.group.WORLD, 0, tp, sequence)
            split_model(whole, model.tensor_plan(), part)
            loss = partial(parallel_cross_entropy, classes=model.outputs(), smoothing=smoothing, part=part)
        if device_type == "cuda":
            _without_attention_dropout(whole)
        value = torch.zeros(samples, *model.input_shape(), dtype=torch.int64 if text else torch.float32)
        targets = torch.zeros((samples, *model.input_shape()) if text else (samples,), dtype=torch.int64)
        own = [*whole.parameters(), *whole.buffers(), targets]
        known = {identity(parameter) for parameter in whole.parameters()}
        counted: set[int] = set()
        blocks = dict(whole.named_children())
        for name, block in blocks.items():
            last = name == list(blocks)[-1]
            watch = Watch(name, block, model.tensor_plan(), samples)
            mixed = torch.autocast("cpu", type_of_dtype[precision], enabled=precision != "fp32")
            entering = 0 if identity(value) in known else size(value)
            with Living([*own, value]) as living:
                with mixed, watch.forward(), kept_bytes(known) as kept:
                    output = block(value)
                    result = loss(output, targets) if last else output
                living.turn(output, known)
                _backward(result, watch)
            passes = living.passes(parameter.grad for parameter in block.parameters())
            found = _seen(name, block, watch, model.tensor_plan(), kept[0], output, samples, counted)
            seen.append(replace(found, entering=entering / samples, passes=passes))
            block.zero_grad()
            value = output.detach().requires_grad_()
    return seen


def _backward(result: Tensor, watch: Watch) -> None:
    """Its gradient is freed as soon as it is used, as within a whole model: nothing here refers to it."""
    gradient = [torch.ones_like(result)]
    result.register_hook(lambda _: gradient.pop())
    anything = torch.ones((), dtype=result.dtype).expand_as(result)
    with watch.backward():
        result.backward(anything)


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
