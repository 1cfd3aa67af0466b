"""Seconds of each block's forward and backward pass, measured on a device. The median of the repeats counts.

Device events time them on CUDA, and the host does not wait between the repeats: as in a training step, it starts
kernels while earlier ones run. On an H100 the blocks of ResNet-50 took 26 % longer than its step when the host waited
after each pass (docs/measurements/2026-11-26-h100.md).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from statistics import median

import torch
from torch import Tensor, nn

from ddlbench.job import Batch, type_of_dtype
from ddlbench.measure.clock import Stamp, idle, seconds, stamp

REPEATS = 5  # after a first one, which allocates and compiles

Loss = Callable[[Tensor, Tensor], Tensor]


def block_seconds(
    model: nn.Sequential,
    batch: Batch,
    loss: Loss,
    precision: str,
    prepare: Callable[[nn.Module], object] = lambda _: None,
) -> list[tuple[float, float]]:
    """Seconds forward and backward of every block for this batch, on its device; the last block's include the loss.

    The input of a block is the output of the block before. Copies of the blocks are measured, one after another, so
    that the model does not change, and the device has the weights of one copy at a time. prepare: called with each copy
    """
    value, passes = batch.inputs, list[tuple[float, float]]()
    *_, last = model.children()
    for block in model.children():
        targets = batch.targets if block is last else None
        prepare(copy := deepcopy(block).to(value.device))
        both, value = _measured(copy, value, loss, targets, precision)
        passes.append(both)
    return passes


def _measured(
    block: nn.Module, value: Tensor, loss: Loss, targets: Tensor | None, precision: str
) -> tuple[tuple[float, float], Tensor]:
    """The seconds of a block, and its output. targets: of the last block, whose passes include the loss"""
    device, output = value.device, value
    stamps: list[tuple[Stamp, Stamp, Stamp]] = []
    for _ in range(REPEATS + 1):
        begin = stamp(device)
        with torch.autocast(device.type, type_of_dtype[precision], enabled=precision != "fp32"):
            output = block(value)
            result = output if targets is None else loss(output, targets)
        half = stamp(device)
        result.backward(torch.ones_like(result))
        stamps.append((begin, half, stamp(device)))
        block.zero_grad()
        value = value.detach().requires_grad_(value.is_floating_point() and value.requires_grad)
    idle(device)
    passes = [(seconds(begin, half), seconds(half, end)) for begin, half, end in stamps[1:]]
    forward, backward = map(median, zip(*passes, strict=True))
    following = output.detach().requires_grad_(output.is_floating_point())
    return (forward, backward), following
