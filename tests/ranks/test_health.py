from __future__ import annotations

import pytest
import torch

from ddlbench.errors import Diverged
from ddlbench.ranks.health import Health

CPU = torch.device("cpu")


def losses(values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


def watch(values: list[float], every: int) -> int | None:
    """The step at which the run stops, None if it goes on to its end."""
    health = Health(CPU, every)
    seen: list[torch.Tensor] = []
    try:
        for step, loss in enumerate(losses(values)):
            seen.append(loss)
            health.watch(seen, step)
        health.count(len(values))
    except Diverged:
        return len(seen) - 1
    return None


def test_finite_losses_pass() -> None:
    assert watch([1.0] * 40, every=4) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_noticed_two_beats_after_the_look(bad: float) -> None:
    values = [1.0] * 40
    values[5] = bad  # looked at after step 7, sent round after 11, acted upon after 15
    assert watch(values, every=4) == 15


def test_the_vote_still_out_counts_at_the_end_of_the_epoch() -> None:
    values = [1.0] * 12
    values[5] = float("nan")
    assert watch(values, every=4) == 11


def test_a_rank_without_losses_votes_too() -> None:
    health = Health(CPU, every=2)
    for step in range(10):
        health.watch([], step)
    health.count(10)
