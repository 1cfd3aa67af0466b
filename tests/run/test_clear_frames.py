"""A set-up that fails half-way leaves no model behind: process groups must not be destroyed while one exists."""

from __future__ import annotations

import weakref

import pytest
from torch import nn

from ddlbench.run.attempt import clear_frames

Models = list["weakref.ref[nn.Module]"]


def set_up(models: Models) -> None:
    model = nn.Linear(1, 1)
    models.append(weakref.ref(model))
    wrap(model)


def wrap(model: nn.Module) -> None:
    wrapped = nn.Sequential(model)
    try:
        raise ValueError("a library's own error")
    except ValueError as error:
        raise RuntimeError(f"cannot train {wrapped}") from error


def test_the_model_of_a_failed_set_up_is_forgotten() -> None:
    models: Models = []
    with pytest.raises(RuntimeError) as caught:
        set_up(models)
    assert models[0]() is not None  # in the frames that the error has passed through
    clear_frames(caught.value)
    assert models[0]() is None
    assert caught.traceback[-1].name == "wrap"  # the traceback can still be printed
