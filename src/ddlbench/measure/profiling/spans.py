"""The names of the parts of a step, the same in every framework, for profilers.

A part that runs on the host's thread is named by `span` or `spanned`. Collectives that a library starts by itself
(in DDP's or FSDP's backward pass, say) have the library's names: measure/profiling/profile.py knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch.autograd.profiler
from torch.profiler import record_function

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

FORWARD = "ddlbench/forward"  # with the loss
BACKWARD = "ddlbench/backward"
UPDATE = "ddlbench/update"  # unscaling, clipping, the optimizer's step, clearing gradients
COMMUNICATE = "ddlbench/communicate"  # collectives that the adapter itself starts or waits for
DATA = "ddlbench/data"  # from asking for a batch to having it
WAIT = "ddlbench/wait"  # the host waits for a collective or a message; in profiled windows
WINDOW = "ddlbench/window"  # all steps of a profiled window

_NOTHING = nullcontext()


def profiling() -> bool:
    """Whether a profiler of torch is on."""
    return torch.autograd.profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def span(name: str) -> AbstractContextManager[object]:
    """One part of a step; nothing while no profiler is on, because `record_function` always costs microseconds."""
    return record_function(name) if profiling() else _NOTHING


def spanned(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, with every call recorded as a part of a step."""

    def named(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with span(name):
            return function(*args, **kwargs)

    return named
