"""Function modes during a backward pass: torch leaves a mode while it runs one of its own functions, as a backward pass
is. Here they are entered again, so that hooks and recomputed blocks come to them, too."""

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
    """One of BACKWARD, in a mode's own `__torch_function__`."""
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
