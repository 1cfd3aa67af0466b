"""What makes a host wait for a GPU that is not there, each with the line that asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import pytest
import torch

from ddlbench.frameworks.tensor.collectives import all_gather
from ddlbench.ranks.fake.fake import fake_world
from ddlbench.rehearsal.observed import PACKAGE, TO_HOST, UNPINNED, Group, Observed

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def line() -> int:
    """The number of the caller's next line."""
    return cast(FrameType, cast(FrameType, inspect.currentframe()).f_back).f_lineno + 1


def test_copies_of_a_gpu_by_line() -> None:
    with fake_world(0, 1, CUDA):
        observed, own, other = Observed(CUDA), torch.zeros(3, device=CUDA), torch.zeros(3)
        with observed.observing():
            first = line()
            other.to(CUDA)
            own.copy_(other)
            own.cpu()
            other.cpu()
            own.clone()
            torch.cuda.synchronize()
    assert observed.waits == {
        (UNPINNED, f"test_observed.py:{first}"): 1,
        (UNPINNED, f"test_observed.py:{first + 1}"): 1,
        (TO_HOST, f"test_observed.py:{first + 2}"): 1,
        ("synchronize", f"test_observed.py:{first + 5}"): 1,
    }


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda tensor: tensor.sum().item(), "item"),
        (lambda tensor: bool(tensor.sum() > 0), "item"),
        (lambda tensor: torch.equal(tensor, tensor), "equal"),
    ],
)
def test_numbers_that_the_host_needs(call: Callable[[torch.Tensor], object], name: str) -> None:
    """The tensor is on the device; tensors on the CPU cost nothing there."""
    with fake_world(0, 1, CUDA):
        observed = Observed(CUDA)
        on_device, on_host = torch.zeros(3, device=CUDA), torch.zeros(3)
        with observed.observing():
            call(on_host)
            call(on_device)
    assert [waited for waited, _ in observed.waits] == [name]


def test_a_library_in_a_folder_with_the_name_of_the_package_is_a_library() -> None:
    """A clone of the repository is called ddlbench, and `make setup` puts the libraries into its .venv."""
    observed = Observed(CPU)
    outer: dict[str, Any] = {"note": partial(observed.note_wait, "item")}
    library = "/home/me/ddlbench/.venv/lib/python3.12/site-packages/torch/optim/adam.py"
    exec(compile("def step():\n    note()", library, "exec"), outer)
    exec(compile("step()", f"{PACKAGE}frameworks/ddp.py", "exec"), outer)
    assert observed.waits == {("item", "ddlbench/frameworks/ddp.py:1 (torch/optim/adam.py:2)"): 1}


def test_the_group_and_the_bytes_of_a_collective() -> None:
    """The complete message: what an all-gather ends with, also where it returns it, as for DTensor."""
    with fake_world(3, 8, CPU):
        group, _ = torch.distributed.new_subgroups_by_enumeration([[0, 2, 4, 6], [1, 3, 5, 7]])
        observed, whole, own = Observed(CPU), torch.zeros(8), torch.zeros(2)
        with observed.observing():
            torch.distributed.all_reduce(own)
            all_gather(whole, own, group=group)
            torch.ops._c10d_functional.all_gather_into_tensor(own, 4, group.group_name)
    sent = [(operation.group, operation.bytes_) for operation in observed.operations if operation.group]
    assert sent == [(Group("all_reduce", 8, 1), 8), (Group("all_gather", 4, 2), 32), (Group("all_gather", 4, 2), 32)]


def test_the_most_that_lives_at_once() -> None:
    with fake_world(0, 1, CPU):
        observed = Observed(CPU)
        with observed.observing():
            kept = torch.zeros(256)
            observed.clear()
            passing = [kept + 1, kept + 2]
            passing.clear()
            after = kept * 2
    assert observed.alive.peak == 3 * 1024
    assert observed.alive.bytes_ == 2 * 1024
    assert after.shape == kept.shape
