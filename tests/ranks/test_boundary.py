"""All ranks stop at the same boundary for a loss that is not finite, and no step waits; test_stop.py has the rest.
Losses are kept in their order."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddlbench.errors import Diverged, Failure, RunError, Stopped
from ddlbench.ranks.boundary import Boundary, StopRequest
from tests.support.ranks import run_ranks
from tests.support.syncs import counted

CPU = torch.device("cpu")
NAN = float("nan")


def begun(device: torch.device = CPU) -> Boundary:
    made = Boundary(device, every=4)
    made.begin(0, 40)
    return made


def stopped_after(values: Sequence[float | None], boundary: Boundary) -> tuple[int, RunError | None]:
    """Steps until the run stops, and why; all of them and None where it goes on to its end."""
    boundary.begin(0, 40)
    try:
        for value in values:
            boundary.pass_step(None if value is None else torch.tensor(value))
        boundary.require_finite()
    except RunError as error:
        return boundary.steps, error
    return boundary.steps, None


def test_finite_losses_pass_with_a_heartbeat_at_every_step() -> None:
    beats: list[int] = []
    boundary = Boundary(CPU, lambda: beats.append(boundary.steps), every=4)
    assert stopped_after([1.0] * 40, boundary) == (40, None)
    assert beats == list(range(40))


def test_what_comes_before_an_epoch_is_not_done_for_one_that_does_not_begin() -> None:
    done: list[str] = []
    Boundary(CPU, before_epoch=lambda _: done.append("goes on")).begin(0, 40)
    stop = StopRequest(0)
    stop.decide(stop.announce(Failure("killed", "asked", 143, 0)) + 1)
    with pytest.raises(Stopped, match="asked; stopped before epoch 0"):
        Boundary(CPU, stop=stop.pass_boundary, before_epoch=lambda _: done.append("stops")).begin(0, 40)
    assert done == ["goes on"]


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_a_bad_loss_stops_two_boundaries_of_the_vote_later(bad: float) -> None:
    values = [1.0] * 40
    values[5] = bad  # copied after step 7, sent after 11, acted on after 15
    steps, error = stopped_after([*values], Boundary(CPU, every=4))
    assert steps == 16
    assert isinstance(error, Diverged)
    assert "at epoch 0, step 15" in str(error)


def test_the_vote_in_flight_counts_at_the_end_of_the_epoch() -> None:
    values = [1.0] * 12
    values[5] = NAN
    steps, error = stopped_after(values, Boundary(CPU, every=4))
    assert (steps, type(error)) == (12, Diverged)
    assert "at epoch 0, step 11" in str(error)  # the last of 12


def test_a_loss_counts_in_its_own_epoch_only() -> None:
    boundary = Boundary(CPU, every=4)
    stopped_after([1.0] * 9 + [NAN], boundary)  # the row of this epoch says it
    assert stopped_after([1.0] * 40, boundary) == (40, None)


def test_steps_between_votes_do_not_wait_for_the_device() -> None:
    boundary = begun()
    with counted() as counts:
        for _ in range(3):
            boundary.pass_step(torch.ones(()))
    assert not counts


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns where it is switched on
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_vote_does_not_wait_for_its_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no waits: there it shows that the GPU's case can run, and leaves torch as it was."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    boundary = begun(torch.device(device))
    values = torch.tensor([1.0] * 5 + [NAN] + [1.0] * 20, device=device).unbind()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(Diverged):
            deque(map(boundary.pass_step, values))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.get_sync_debug_mode() == 0
    assert boundary.steps == 16


@cache
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, every_case)


def every_case() -> dict[str, Any]:
    rank = dist.get_rank()
    ended: list[bool] = []
    result: dict[str, Any] = {"ended": ended}
    result["quiet"] = stopped_after([1.0] * 20 if rank else [None] * 20, Boundary(CPU, every=4))
    bad = [1.0] * 5 + [NAN] + [1.0] * 30
    result["diverged"] = stopped_after([1.0] * 36 if rank else [*bad], Boundary(CPU, every=4))

    boundary = begun()
    for _ in range(8):
        boundary.pass_step(torch.tensor(1.0))
    ended.append(without_the_host(boundary))
    boundary.require_finite()
    return result


def without_the_host(boundary: Boundary) -> bool:
    """Whether the vote in flight ends though this rank's host does nothing more."""
    assert boundary.vote is not None
    work = boundary.vote.work
    assert work is not None
    deadline = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    return work.is_completed()


def test_a_rank_without_losses_votes_too() -> None:
    assert [result["quiet"] for result in two_ranks()] == [(20, None)] * 2


def test_both_ranks_diverge_at_the_same_step() -> None:
    for steps, error in (result["diverged"] for result in two_ranks()):
        assert (steps, type(error)) == (16, Diverged)


def test_a_vote_in_flight_ends_without_the_host() -> None:
    assert [result["ended"] for result in two_ranks()] == [[True], [True]]


def test_losses_in_their_order_and_no_tensor_of_a_step_stays() -> None:
    passed, steps = begun(), list[weakref.ref[torch.Tensor]]()
    for value in (3.0, float("nan"), -1.0):
        loss = torch.tensor(value)
        passed.pass_step(loss)
        steps.append(weakref.ref(loss))
        del loss
    first, second, third = passed.losses.tolist()
    assert (first, second != second, third) == (3.0, True, -1.0)
    assert [step() for step in steps] == [None] * 3


def test_an_epoch_without_losses_on_this_rank() -> None:
    passed = begun()
    passed.pass_step(torch.tensor(1.0))
    passed.begin(1, 4)
    passed.pass_step(None)
    assert passed.losses.tolist() == []


def test_a_loss_of_another_type_is_a_number_of_32_bits() -> None:
    passed = begun()
    passed.pass_step(torch.tensor(1 / 3, dtype=torch.bfloat16))
    passed.pass_step(torch.tensor(1 / 3))
    assert passed.losses.tolist() == [torch.tensor(1 / 3, dtype=torch.bfloat16).item(), torch.tensor(1 / 3).item()]
