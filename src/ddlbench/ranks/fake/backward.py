"""Function modes during a backward pass. torch leaves a mode while it runs one of its functions, and a backward pass is
one. Here the modes are entered again, so that they also see hooks and recomputed blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
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


def _entering(engine: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            while _left:
                stack.enter_context(_left.pop())
            return engine(*args, **kwargs)

    return run


ANSWERS: tuple[Answer, ...] = (
    (torch.autograd, "_engine_run_backward", _entering(torch.autograd.graph._engine_run_backward)),  # pyright: ignore
)
