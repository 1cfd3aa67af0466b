"""Function modes during a backward pass. torch leaves a mode while it runs one of its functions, and a backward pass is
one. Here the modes are entered again, so that they also see hooks and recomputed blocks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ddlbench.ranks.fake.answers import Answer

BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_left: list[TorchFunctionMode] = []  # innermost first


def leave(mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of BACKWARD in the `__torch_function__` of a mode."""
    _left.append(mode)
    try:
        return func(*args, **kwargs)
    finally:
        if mode in _left:
            _left.remove(mode)


@contextmanager
def _entered_again() -> Generator[None]:
    with ExitStack() as stack:
        while _left:
            stack.enter_context(_left.pop())
        yield


ANSWERS: tuple[Answer, ...] = (
    (torch.autograd, "_engine_run_backward", _entered_again()(torch.autograd.graph._engine_run_backward)),  # pyright: ignore
)
