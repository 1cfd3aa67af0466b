"""Activation checkpointing of named blocks, exact for BatchNorm too."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddlbench.frameworks.shared.batchnorm import batch_norms


def checkpoint_blocks(model: nn.Sequential) -> None:
    """Every named block keeps its input only and runs again in the backward pass (Chen et al. 2016)."""
    for block in model.children():
        contexts = partial(lambda block: (nullcontext(), _frozen_statistics(block)), block)  # of first and second run
        forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        block.forward = cast(Callable[..., Tensor], forward)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Generator[None]:
    """The second forward of a checkpointed block must not move BatchNorm's running statistics a second time. With
    momentum 0 they stay, and autograd sees the same operations as in the first forward, which it insists on."""
    norms = [(norm, norm.momentum) for norm in batch_norms(block) if norm.num_batches_tracked is not None]
    for norm, _ in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in norms:
            norm.momentum = momentum
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked -= 1
