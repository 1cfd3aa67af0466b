"""Counts the work and the memory of the blocks of a model: the real model runs under fake tensors.

The model and the loss run forward and backward at two batch sizes, without data. A straight line through the two counts
of each operation gives the part that grows with the batch (activations) and the part that does not (weights).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ddlbench.job import Model
from ddlbench.measure.formulas.memory_formula import SPLIT
from ddlbench.oracle.counts.counts import Block, Counts, Exchange, Line, Live, Numbers, Rows, Work
from ddlbench.oracle.counts.fake_model import Feed, feed
from ddlbench.oracle.counts.live_bytes import LiveBytes
from ddlbench.oracle.counts.operations import Operation, Watch, saved_bytes
from ddlbench.rehearsal.observed import size
from ddlbench.rehearsal.storages import identity

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
    return Counts(model.name, tuple(blocks), sum(pair.tied for pair in small))


def _lines(small: Sequence[float], large: Sequence[float]) -> tuple[Numbers, Numbers]:
    """Intercepts and slopes of the straight lines through the counts at both batch sizes."""
    first, second = np.array(small, dtype=float), np.array(large, dtype=float)
    slopes = (second - first) / (SAMPLES[1] - SAMPLES[0])
    return first - slopes * SAMPLES[0], slopes


def _work(small: list[Operation], large: list[Operation]) -> Work:
    assert [op.name for op in small] == [op.name for op in large], "the batch size changes what runs"
    return Work(
        np.array([op.flops / SAMPLES[0] for op in small], dtype=float),
        *_lines([op.bytes_ for op in small], [op.bytes_ for op in large]),
        np.array([op.shared for op in small], dtype=bool),
    )


@dataclass(frozen=True)
class _Seen:
    """The counts of one block at one batch size."""

    name: str
    forward: list[Operation]
    backward: list[Operation]
    saved: float
    output: float
    unsaved_output: float
    weighted_outputs: float
    live_forward: list[float]
    live_backward: list[float]
    live_accumulating: list[float]
    parameters: tuple[int, ...]
    split_parameters: int
    tied: int
    buffers: int
    exchanges: tuple[Exchange, ...]
    rows: tuple[Rows, ...]

    def named(self, name: str) -> _Seen:
        """An equal block of another name."""
        exchanges = tuple(replace(one, name=one.name.replace(self.name, name, 1)) for one in self.exchanges)
        rows = tuple(replace(one, name=one.name.replace(self.name, name, 1)) for one in self.rows)
        return replace(self, name=name, exchanges=exchanges, rows=rows)


def _joined(small: _Seen, large: _Seen) -> Block:
    (saved,), (more,) = _lines([small.saved], [large.saved])
    return Block(
        name=small.name,
        forward=_work(small.forward, large.forward),
        backward=_work(small.backward, large.backward),
        parameters=small.parameters,
        split_parameters=small.split_parameters,
        output=small.output,
        saved=Line(float(saved), float(more)),
        buffers=small.buffers,
        exchanges=small.exchanges,
        rows=small.rows,
        unsaved_output=small.unsaved_output,
        weighted_outputs=small.weighted_outputs,
        live_forward=Live(*_lines(small.live_forward, large.live_forward)),
        live_backward=Live(*_lines(small.live_backward, large.live_backward)),
        live_accumulating=Live(*_lines(small.live_accumulating, large.live_accumulating)),
    )


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
    return seen


def _maker(fed: Feed, output: Tensor) -> Callable[[], Tensor]:
    """A function that makes tensors like this output, without a reference to it."""
    make = partial(torch.empty_strided, output.shape, output.stride(), dtype=output.dtype)
    is_saved = identity(output) in fed.saved

    def made() -> Tensor:
        tensor = make()
        if is_saved:
            fed.saved.add(identity(tensor))
            weakref.finalize(tensor.untyped_storage(), fed.saved.discard, identity(tensor))
        return tensor

    return made


def _kind(fed: Feed, name: str, block: nn.Module, counted: set[int]) -> object:
    """A key that is equal for blocks that compute the same: modules, new parameters, input; the last one has a loss."""
    parameters = tuple((key, tensor.shape, id(tensor) in counted) for key, tensor in block.named_parameters())
    value = fed.value
    block_input = value.shape, value.dtype, value.stride(), value.requires_grad, identity(value) in fed.saved
    return fed.is_last(name), repr(block), parameters, block_input


def _run_block(
    fed: Feed, name: str, block: nn.Module, plan: Mapping[str, str], samples: int, counted: set[int]
) -> tuple[_Seen, Tensor]:
    """The counts of one block, and its output."""
    watch = Watch(name, block, plan, samples)
    value, saved_before = fed.value, identity(fed.value) in fed.saved
    with LiveBytes([*fed.uncounted, value] if saved_before else fed.uncounted, value) as live:
        with fed.mixed(), watch.forward(), saved_bytes(fed.saved) as saved:
            output = block(value)
            result = fed.loss(output, fed.targets) if fed.is_last(name) else output
        begin, unsaved = len(live.after), 0 if identity(output) in fed.saved else size(output)
        _backward(result, watch)
    gradients = [parameter.grad for parameter in block.parameters()]
    live_backward, live_accumulating = live.after[begin:], live.without(gradients, begin)
    block.zero_grad()
    parameters = {f"{name}.{key}": parameter for key, parameter in block.named_parameters()}
    new = {key: parameter for key, parameter in parameters.items() if id(parameter) not in counted}
    split = {f"{module}.{tensor}" for module, style in plan.items() for tensor in SPLIT.get(style, ())}
    seen = _Seen(
        name=name,
        forward=watch.forward_operations,
        backward=watch.backward_operations,
        saved=saved[0],
        output=output.numel() * output.element_size() / samples,
        unsaved_output=unsaved / samples,
        weighted_outputs=watch.weighted_outputs / samples,
        live_forward=live.after[:begin],
        # An output that autograd does not save is freed before the backward pass; here `output` still refers to it.
        live_backward=[bytes_ - unsaved for bytes_ in live_backward],
        live_accumulating=[bytes_ - unsaved for bytes_ in live_accumulating],
        parameters=tuple(parameter.numel() for parameter in new.values()),
        split_parameters=sum(parameter.numel() for key, parameter in new.items() if key in split),
        tied=sum(parameter.numel() for key, parameter in parameters.items() if key not in new),
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in block.buffers()),
        exchanges=tuple(
            Exchange(module, style, input_bytes / samples, output_bytes / samples, first)
            for module, style, input_bytes, output_bytes, first in watch.modules
        ),
        rows=tuple(Rows(module, halo, row / samples, height) for module, halo, row, height in watch.rows),
    )
    return seen, output


def _backward(result: Tensor, watch: Watch) -> None:
    """Run the backward pass. The output's gradient is freed as soon as it is used, as within a complete model, because
    nothing here refers to it."""
    gradient = [torch.ones_like(result)]
    result.register_hook(lambda _: gradient.pop())
    anything = torch.ones((), dtype=result.dtype).expand_as(result)
    with watch.backward():
        result.backward(anything)
