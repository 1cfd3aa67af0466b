"""Which weights a server sends, when, and how it updates them: gradients of all ranks come in a chosen order, and what
would be sent is kept. test_parameter_server.py has the messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.frameworks.parameter_server.server import Server
from tests.support.jobs import job


@dataclass
class Sent:
    """Stands for a group of ranks: (rank, weight, staleness) of each message."""

    messages: list[tuple[int, float, int]] = field(default_factory=list[tuple[int, float, int]])

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        weight, age = tensors[0].tolist()
        self.messages.append((rank, weight, int(age)))


def served(ranks: int, bound: int, optimizer: Any = torch.optim.SGD) -> tuple[Server, Sent]:
    """Rank 0's server of one weight, which is 10, at learning rate 1; all ranks but the last are others' (so that all
    answers are messages)."""
    group = Sent()
    here = replace(
        job(), rank=ranks, world_size=ranks, optimizer=lambda named: optimizer([w for _, w in named], lr=1.0)
    )
    server = Server(here, {"w": nn.Parameter(torch.tensor([10.0]))}, bound, cast(dist.ProcessGroup, group))
    server.rates = dict.fromkeys(range(100), 1.0)
    return server, group


def send(server: Server, rank: int, gradient: float) -> None:
    server.accept(rank, torch.tensor([gradient]))


def test_without_staleness_all_wait_for_all() -> None:
    server, sent = served(3, bound=0)
    send(server, 1, 3.0)
    send(server, 2, 6.0)
    assert sent.messages == []
    send(server, 0, 0.0)
    assert sorted(sent.messages) == [(rank, 7.0, 0) for rank in range(3)]  # 10 - (0 + 3 + 6) / 3


def test_a_rank_runs_ahead_of_a_slow_one_by_the_bound_and_no_further() -> None:
    server, sent = served(2, bound=2)
    send(server, 0, 2.0)
    send(server, 0, 4.0)
    assert sent.messages == [(0, 10.0, 1), (0, 10.0, 2)], "no gradient of rank 1 is needed"
    send(server, 0, 6.0)
    assert len(sent.messages) == 2, "its next gradient would be three updates old"
    send(server, 1, 8.0)
    assert sent.messages[2:] == [(0, 5.0, 2), (1, 5.0, 0)]  # 10 - (2 + 8) / 2; of clocks 3 and 1


def test_gradients_of_a_clock_make_one_update_whatever_their_order() -> None:
    server, _ = served(2, bound=3)
    for clock in range(3):
        send(server, 0, 1.0 + clock)
    for clock in range(3):
        send(server, 1, 3.0 + clock)
        assert server.version == clock + 1
    assert server.weights["w"].item() == 10.0 - (2.0 + 3.0 + 4.0)
    assert not server.gradients


def test_each_update_has_the_learning_rate_of_its_clock() -> None:
    server, _ = served(1, bound=0)
    server.rates = {0: 0.5, 1: 0.25}
    for _ in range(2):
        send(server, 0, 4.0)
    assert server.weights["w"].item() == 10.0 - 2.0 - 1.0


def test_who_ends_an_epoch_gets_the_weights_after_its_last_update() -> None:
    server, sent = served(2, bound=5)
    send(server, 0, 2.0)
    server.accept(0, None)
    assert sent.messages == [(0, 10.0, 1)]
    send(server, 1, 2.0)
    assert sent.messages[1:] == [(0, 8.0, 0), (1, 8.0, 0)]


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_no_answer_is_older_than_the_bound_in_any_order(bound: int, seed: int) -> None:
    """Ranks that send as they may: a rank sends when it has its last answer."""
    chance, ranks, clocks = random.Random(seed), 3, 20
    server, sent = served(ranks, bound)
    may, made = set(range(ranks)), [0] * ranks
    while may:
        rank = chance.choice(sorted(may))
        may.remove(rank)
        before = len(sent.messages)
        made[rank] += 1
        send(server, rank, 1.0)
        answered = sent.messages[before:]
        assert all(0 <= age <= bound for _, _, age in answered)
        assert all(weight == 10.0 - (made[to] - age) for to, weight, age in answered), "clock - version = staleness"
        may |= {to for to, _, _ in answered if made[to] < clocks}
        assert max(made) - min(made) <= bound + 1
    assert made == [clocks] * ranks
    assert server.version == clocks
