"""Counts what each block of a model computes, moves and keeps: from the real model, under fake tensors.

Nothing is typed in: the model and the loss run forward and backward at two batch sizes, without data, and every
operation is looked at. What does not grow with the batch (weights) and what does (activations) follow from the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ddlbench.job import Model
from ddlbench.measure.formulas.memory_formula import SPLIT
from ddlbench.oracle.counts.counts import Arrival, Block, Counts, Exchange, Line, Moments, Rows, Work
from ddlbench.oracle.counts.fake_model import Feed, feed
from ddlbench.oracle.counts.live_bytes import Living, Passes
from ddlbench.oracle.counts.operations import Operation, Watch, kept_bytes
from ddlbench.rehearsal.observed import identity, size

SAMPLES = (2, 4)  # BatchNorm refuses one value a channel


def count(
    model: Model, precision: str, device_type: str, smoothing: float = 0.0, tp: int = 1, sequence: bool = False
) -> Counts:
    """The counts of a model, made once for each model, precision and kind of device. tp: count the part of one of tp
    ranks that share every layer, with sequence parallelism or without."""
    return _count(Key.of(model), precision, device_type, smoothing, tp, sequence)


@dataclass(frozen=True)
class Key:
    """A model as the argument of a cached function."""

    model: Model
    text: str

    @classmethod
    def of(cls, model: Model) -> Key:
        return cls(replace(cast(Any, model)), repr(model))  # a copy: dataclasses of models may be changed

    def __hash__(self) -> int:
        return hash((type(self.model), self.text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and (type(other.model), other.text) == (type(self.model), self.text)


@cache
def _count(key: Key, precision: str, device_type: str, smoothing: float, tp: int, sequence: bool) -> Counts:
    model = key.model
    small, large = (_run(model, precision, device_type, smoothing, samples, tp, sequence) for samples in SAMPLES)
    blocks = [_joined(a, b) for a, b in zip(small, large, strict=True)]
    single = partial(_single, key, precision, device_type, smoothing, tp, sequence)
    return Counts(model.name, tuple(blocks), sum(pair.tied for pair in small), single)


@cache
def _single(
    key: Key, precision: str, device_type: str, smoothing: float, tp: int, sequence: bool
) -> tuple[Block, ...] | None:
    try:
        seen = _run(key.model, precision, device_type, smoothing, 1, tp, sequence)
    except ValueError:  # BatchNorm, of one value a channel
        return None
    return tuple(_joined(block, block) for block in seen)


def line(values: tuple[float, float]) -> Line:
    """The straight line through the counts at both batch sizes."""
    slope = (values[1] - values[0]) / (SAMPLES[1] - SAMPLES[0])
    return Line(values[0] - slope * SAMPLES[0], slope)


def _work(small: list[Operation], large: list[Operation]) -> Work:
    assert [op.name for op in small] == [op.name for op in large], "the batch size changes what runs"
    bytes_ = [line((a.bytes_, b.bytes_)) for a, b in zip(small, large, strict=True)]
    return Work(
        np.array([op.flops / SAMPLES[0] for op in small], dtype=float),
        np.array([line.fixed for line in bytes_], dtype=float),
        np.array([line.each for line in bytes_], dtype=float),
        np.array([op.shared for op in small], dtype=bool),
    )


@dataclass(frozen=True)
class _Seen:
    """One block at one batch size."""

    samples: int
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
    gradients: tuple[tuple[int | None, int], ...]  # of every parameter, tied or not: its place in `parameters`, numbers
    entering: float = 0.0
    passes: Passes = field(default_factory=Passes)
    loss: float = 0.0
    again: list[float] = field(default_factory=list[float])
    turning: float = 0.0

    def named(self, name: str) -> _Seen:
        """An equal block of another name."""
        exchanges = tuple(replace(one, name=one.name.replace(self.name, name, 1)) for one in self.exchanges)
        rows = tuple(replace(one, name=one.name.replace(self.name, name, 1)) for one in self.rows)
        return replace(self, name=name, exchanges=exchanges, rows=rows)


def _joined(small: _Seen, large: _Seen) -> Block:
    return Block(
        name=small.name,
        forward=_work(small.forward, large.forward),
        backward=_work(small.backward, large.backward),
        parameters=small.parameters,
        split_parameters=small.split_parameters,
        leaving=small.leaving,
        kept=line((small.kept, large.kept)),
        buffers=small.buffers,
        exchanges=small.exchanges,
        rows=small.rows,
        entering=small.entering,
        ahead=moments(small.passes.ahead, large.passes.ahead),
        back=moments(small.passes.back, large.passes.back),
        added=moments(small.passes.added, large.passes.added),
        freeing=moments(*(seen.passes.last_use(seen.passes.back) for seen in (small, large))),
        freeing_added=moments(*(seen.passes.last_use(seen.passes.added) for seen in (small, large))),
        arrivals=_arrivals(small, large),
        lingering=small.passes.lingering / small.samples,
        loss=line((small.loss, large.loss)),
        again=moments(small.again, large.again),
        turning=line((small.turning, large.turning)),
    )


def _arrivals(small: _Seen, large: _Seen) -> tuple[Arrival, ...]:
    assert small.passes.arrivals == large.passes.arrivals, "the batch size changes when gradients arrive"
    arrivals: list[Arrival] = []
    for which, at in small.passes.arrivals:
        parameter, numbers = small.gradients[which]
        arrivals.append(Arrival(parameter, numbers, line((small.passes.added[at], large.passes.added[at]))))
    return tuple(arrivals)


def moments(small: list[float], large: list[float]) -> Moments:
    """The moments that are the fullest at some batch size."""
    lines = {line(pair) for pair in zip(small, large, strict=True)}
    above = [line for line in lines if not any(_covers(other, line) for other in lines - {line})]
    return Moments(tuple(sorted(above, key=lambda line: line.each)))


def _covers(one: Line, other: Line) -> bool:
    return one.each >= other.each and one.at(1) >= other.at(1)


def _run(
    model: Model, precision: str, device_type: str, smoothing: float, samples: int, tp: int, sequence: bool
) -> list[_Seen]:
    """Run every block forward and backward by itself; of equal blocks with equal inputs only the first."""
    seen: list[_Seen] = []
    counted: set[int] = set()
    runs = dict[object, tuple[_Seen, Callable[[], Tensor]]]()
    with feed(model, precision, device_type, smoothing, samples, tp, sequence) as fed:
        for name, block in fed.blocks.items():
            kind = _kind(fed, name, block, counted)
            if kind in runs:
                one, make_output = runs[kind]
                output = make_output()
            else:
                one, output = _run_block(fed, name, block, model.tensor_plan(), samples, counted)
                runs[kind] = one, _maker(fed, output)
            counted |= {id(parameter) for parameter in block.parameters()}
            seen.append(one.named(name))
            fed.pass_on(output)
            del output  # the next block frees its input
    return seen


def _maker(fed: Feed, output: Tensor) -> Callable[[], Tensor]:
    """A function that makes tensors like this output, without a reference to it."""
    make = partial(torch.empty_strided, output.shape, output.stride(), dtype=output.dtype)
    is_kept = identity(output) in fed.known

    def made() -> Tensor:
        tensor = make()
        if is_kept:
            fed.known.add(identity(tensor))
            weakref.finalize(tensor.untyped_storage(), fed.known.discard, identity(tensor))
        return tensor

    return made


def _kind(fed: Feed, name: str, block: nn.Module, counted: set[int]) -> object:
    """A key that is equal for blocks that compute the same: modules, new parameters, input; the last one has a loss."""
    parameters = tuple((key, each.shape, id(each) in counted) for key, each in block.named_parameters())
    value = fed.value
    entering = value.shape, value.dtype, value.stride(), value.requires_grad, identity(value) in fed.known
    return fed.is_last(name), repr(block), parameters, entering


def _run_block(
    fed: Feed, name: str, block: nn.Module, plan: Mapping[str, str], samples: int, counted: set[int]
) -> tuple[_Seen, Tensor]:
    """Run one block; what was seen, and its output."""
    watch = Watch(name, block, plan, samples)
    others = fed.known
    entering = 0 if identity(fed.value) in others else size(fed.value)
    value = fed.take()
    with Living([*fed.given, value]) as living:
        living.enters(value)
        with fed.mixed(), watch.forward(), kept_bytes(others, living.note_saved, living.note_used) as kept:
            output = block(value)
            before, saved = kept[0], living.saved
            result = fed.loss(output, fed.targets) if fed.is_last(name) else output
        block_kept = kept[0] - (entering if identity(value) in others else 0)  # the input is given
        del value
        living.turn(output, others)
        _backward(result, watch)
    passes = living.passes(parameter.grad for parameter in block.parameters())
    block.zero_grad()
    one = replace(
        _seen(name, block, watch, plan, kept[0], output, samples, counted),
        entering=entering / samples,
        passes=passes,
        loss=kept[0] - before,
        again=passes.ahead[:saved],
        turning=max(0.0, (living.used or 0.0) - block_kept),
    )
    return one, output


def _backward(result: Tensor, watch: Watch) -> None:
    """Run the backward pass. The output's gradient is freed as soon as it is used, as within a complete model, because
    nothing here refers to it."""
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
    parameters = {f"{name}.{key}": parameter for key, parameter in block.named_parameters()}
    new = {key: parameter for key, parameter in parameters.items() if id(parameter) not in counted}
    split = {f"{module}.{tensor}" for module, style in plan.items() for tensor in SPLIT.get(style, ())}
    places = {key: place for place, key in enumerate(new)}
    exchanges = tuple(
        Exchange(module, style, entering / samples, leaving / samples, first)
        for module, style, entering, leaving, first in watch.modules
    )
    return _Seen(
        samples=samples,
        name=name,
        forward=watch.ahead,
        backward=watch.back,
        kept=kept,
        leaving=output.numel() * output.element_size() / samples,
        parameters=tuple(parameter.numel() for parameter in new.values()),
        split_parameters=sum(parameter.numel() for key, parameter in new.items() if key in split),
        tied=sum(parameter.numel() for key, parameter in parameters.items() if key not in new),
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in block.buffers()),
        exchanges=exchanges,
        rows=tuple(Rows(module, halo, row / samples, height) for module, halo, row, height in watch.rows),
        gradients=tuple((places.get(key), parameter.numel()) for key, parameter in parameters.items()),
    )
