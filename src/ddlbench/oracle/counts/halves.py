"""What lives while a block's backward pass runs in two halves: counted by running torch's own halves on fake tensors.

torch.distributed.pipelining computes gradients of inputs first (`stage_backward_input`) and keeps for the second half
all that autograd kept, and the gradient of the output of each operation that has weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ddlbench.job import Model
from ddlbench.oracle.counts.counting import SAMPLES, Key, line, moments
from ddlbench.oracle.counts.counts import Line, Moments
from ddlbench.oracle.counts.fake_model import Feed, feed
from ddlbench.oracle.counts.live_bytes import Living
from ddlbench.oracle.counts.operations import kept_bytes
from ddlbench.oracle.memory.memory import Sizes
from ddlbench.oracle.memory.pipeline_passes import Halves


@dataclass(frozen=True)
class SplitBlock:
    """One block and one micro batch. inputs: bytes that live during the first half, with what is kept

    between, last: what stays after it, without the gradient of the block's input: within a stage, and where the block
    is the stage's last, whose output no longer refers to what made it; growth: what comes to it in the second half,
    whose gradients are added to others
    """

    inputs: Moments
    between: Line
    last: Line
    growth: Moments


def split(
    model: Model, precision: str, device_type: str, smoothing: float = 0.0, tp: int = 1
) -> tuple[SplitBlock | None, ...]:
    """The counts of every block; None for the first one, because its stage runs both halves at once."""
    return _split(Key.of(model), precision, device_type, smoothing, tp)


@cache
def _split(key: Key, precision: str, device_type: str, smoothing: float, tp: int) -> tuple[SplitBlock | None, ...]:
    small, large = (_run(key.model, precision, device_type, smoothing, samples, tp) for samples in SAMPLES)
    return (None, *(_joined(a, b) for a, b in zip(small, large, strict=True)))


@dataclass(frozen=True)
class _Seen:
    """The counts of one block at one batch size, after each operation."""

    inputs: list[float]
    between: float
    last: float
    growth: list[float]


def _joined(small: _Seen, large: _Seen) -> SplitBlock:
    return SplitBlock(
        moments(small.inputs, large.inputs),
        line((small.between, large.between)),
        line((small.last, large.last)),
        moments(small.growth, large.growth),
    )


def _run(model: Model, precision: str, device_type: str, smoothing: float, samples: int, tp: int) -> list[_Seen]:
    seen: list[_Seen] = []
    with feed(model, precision, device_type, smoothing, samples, tp, False) as fed:
        for name in fed.blocks:
            seen.append(_block(fed, name))
    return seen[1:]


def _block(fed: Feed, name: str) -> _Seen:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    block, value = fed.blocks[name], fed.value
    with Living([*fed.given, value]) as living:
        with fed.mixed(), kept_bytes(fed.known):
            output = block(value)
            result = fed.loss(output, fed.targets) if fed.is_last(name) else output
        fed.pass_on(output)
        if not value.requires_grad:
            return _Seen([], 0.0, 0.0, [])
        living.turn(output, fed.known)
        holder = result.grad_fn  # as the stage's next block would
        gradients = None if fed.is_last(name) else [torch.zeros_like(result)]
        _, groups = stage_backward_input([result], gradients, [value], block.parameters())  # pyright: ignore
        del gradients, _
        turned = len(living.after)
        returned = value.grad.untyped_storage().nbytes() if value.grad is not None else 0
        between = living.now() - returned
        del holder
        last = living.now() - returned
        stage_backward_weight(block.parameters(), groups)
    inputs = [bytes_ - living.idle for bytes_ in living.after[living.turned : turned]]
    growth = [bytes_ - living.idle - returned - last for bytes_ in living.added(block.parameters(), turned)]
    block.zero_grad()
    return _Seen(inputs, between, last, growth)


def halves(
    blocks: Sequence[SplitBlock], sizes: Sequence[Sizes], samples: float, output: float, incoming: float
) -> Halves:
    """Bytes of a stage during both halves of its backward pass.

    sizes: of these blocks
    output: bytes of its output that it holds until the end of the second half; 0 on the last stage
    incoming: bytes of its input, whose gradient stays
    """
    ends = [block.between.at(samples) for block in blocks[:-1]] + [blocks[-1].last.at(samples)]
    inputs = 0.0
    for index, block in enumerate(blocks):
        kept = sum(block_sizes.kept for block_sizes in sizes[:index])
        later = sum(other.between.at(samples) for other in blocks[index + 1 :])
        inputs = max(inputs, kept + later + block.inputs.most(samples))
    between = sum(ends) + output
    return Halves(
        inputs + sizes[-1].lingering, between, between + max(b.growth.most(samples) for b in blocks), incoming
    )
