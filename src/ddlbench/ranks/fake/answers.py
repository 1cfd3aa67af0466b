"""Replacements for attributes of libraries in a fake world (ranks/fake/fake.py), and function modes that stay during a
backward pass: torch leaves a mode while it runs one of its functions, and a backward pass is one. Here the modes are
entered again, so that they also see hooks and recomputed blocks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Answer = tuple[Any, str, Any]  # module or object, name of its attribute, value meanwhile

BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_left: list[TorchFunctionMode] = []  # innermost first


def returning(value: Any) -> Callable[..., Any]:
    """A function that returns `value` for any arguments."""
    return lambda *_, **__: value


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


RUN_BACKWARD = _entered_again()(torch.autograd.graph._engine_run_backward)  # pyright: ignore
