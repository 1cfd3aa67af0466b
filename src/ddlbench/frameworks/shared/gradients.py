"""Gradients of which each rank may have a part: its own part of each, and clipping by the norm of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor, nn


def gradient(parameter: nn.Parameter) -> Tensor:
    """In place: this rank's part of it where the parameter is in shards."""
    assert parameter.grad is not None
    to_local: Callable[[], Tensor] | None = getattr(parameter.grad, "to_local", None)  # DTensor: a second to import
    return to_local() if to_local else parameter.grad


def clip_parts(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    counted: Iterable[nn.Parameter],
    group: dist.ProcessGroup | None,
) -> None:
    """Clip by the norm of the whole gradient, of which each rank of the group has a part (None: this rank has all).
    counted: the parameters whose gradients no other rank counts."""
    gradients = [gradient(parameter) for parameter in parameters]
    norm = nn.utils.get_total_norm([gradient(parameter) for parameter in counted])
    squared = norm.square().to(gradients[0].device)  # that of nothing is on the CPU
    if group is not None:
        dist.all_reduce(squared, group=group)
    shrink = (max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for tensor in gradients:
        tensor *= shrink
