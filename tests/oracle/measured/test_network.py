"""What --calibrate-network makes of its repeats, by hand: this rank's clock and what another rank says are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from ddlbench.oracle.measured import network

CPU = torch.device("cpu")
REDUCED: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda both: both.sum(0)),
    (dist.ReduceOp.MAX, lambda both: both.amax(0)),
    (dist.ReduceOp.MIN, lambda both: both.amin(0)),
)


class TwoRanks:
    """One of two ranks. Its clock stands still but for what `takes`; `others` are what the other rank reduces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: Iterable[object] = ()) -> None:
        self.now, self.others = 0.0, iter(others)
        self.events: list[str] = []
        monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(network, "idle", lambda _: self.takes(0.5))
        for name in ("barrier", "all_reduce"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def takes(self, seconds: float) -> None:
        self.now += seconds

    def computes(self, monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float]) -> None:
        """Seconds of each pass, one after the other."""
        passes = iter(seconds)

        def computing(_device: torch.device, _rows: int) -> Callable[[], None]:
            self.events.append("compute")
            return lambda: self.takes(next(passes))

        monkeypatch.setattr(network, "computing", computing)

    def barrier(self) -> None:
        self.events.append("barrier")
        self.takes(1000)  # the other rank comes late

    def all_reduce(self, tensor: Tensor, op: object = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        if tensor.shape == (network.HIDDEN // network.FP32_BYTES,):
            return SimpleNamespace(wait=lambda: None) if async_op else None
        both = torch.stack([tensor, torch.as_tensor(next(self.others), dtype=tensor.dtype)])
        tensor.copy_(next(reduced for kind, reduced in REDUCED if kind == op)(both))
        return None


@pytest.mark.parametrize(("other", "result"), [(5.0, 5.0), (2.0, 3.5)])
def test_a_measurement_is_that_of_the_slowest_rank_without_its_wait(
    monkeypatch: pytest.MonkeyPatch, other: float, result: float
) -> None:
    """This rank: 1000 s until the other one comes, 3 s, and 0.5 s until the device is idle."""
    ranks = TwoRanks(monkeypatch, [other])
    assert network._timed(lambda: ranks.takes(3), CPU) == result


def sending(monkeypatch: pytest.MonkeyPatch, alone: list[float], rounds: list[float], others: list[float]) -> float:
    """Seconds of a collective. alone, rounds: what one message takes on this rank, in each repeat; a pass takes 1 s.
    others: what each measurement takes on the other rank"""
    ranks = TwoRanks(monkeypatch, others)
    first = [1e6] * 8  # which allocate
    each = iter([*first, *alone, *(seconds for repeat in rounds for seconds in [repeat] * 8)])
    ranks.computes(monkeypatch, iter(lambda: 1.0, None))
    result = network.slowest(lambda _: ranks.takes(next(each)), 4096, CPU)
    assert not list(each)
    return result


def test_a_collective_takes_what_it_adds_to_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 rounds with and without it, on this rank | on the other one | slowest (each with 0.5 s until idle here):

    with     88.5  16.5  56.5   24.5  64.5 | 40  48  50  408  60 | 88.5  48   56.5  408    64.5
    without   8.5   8.5   8.5    8.5   8.5 |  8   8  16    8   8 |  8.5   8.5 16      8.5   8.5
    added: 80, 39.5, 40.5, 399.5, 56. Their median is 56, 7 a round. Alone it takes 1.5, 2.5, 1.5, 4.5 and 50 s: 2.5."""
    others = [1.0, 0.0, 1.0, 2.0, 50.0, 40, 8, 48, 8, 50, 16, 408, 8, 60, 8]
    assert sending(monkeypatch, [1, 2, 1, 4, 1], [10, 1, 6, 2, 7], others) == 7.0


def test_a_collective_takes_at_least_its_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added: 8, 0, 0, 0 and 16 s. Alone: 1.5, 2.5, 3.5, 4.5 and 50 s."""
    others = [1.0, 2.0, 3.0, 4.0, 50.0, *[0.0] * 10]
    assert sending(monkeypatch, [1, 2, 3, 4, 1], [1, 0, 0, 0, 2], others) == 3.5


@pytest.mark.parametrize(("ranks", "numbers"), [(2, 256), (3, 258), (300, 300)])
def test_all_ranks_have_equal_shares_of_a_message(monkeypatch: pytest.MonkeyPatch, ranks: int, numbers: int) -> None:
    """1 KiB, or a few bytes more: gathering refuses unequal shares, and three ranks could not be measured."""
    TwoRanks(monkeypatch, [0.0] * 15).computes(monkeypatch, iter(lambda: 0.0, None))
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    sent = list[int]()
    network.slowest(lambda tensor: sent.append(tensor.numel()), 1024, CPU)
    assert (set(sent), numbers % ranks) == ({numbers}, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_contention_is_the_mean_of_both_ranks_over_rank_0_alone(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """40 passes, the first one before them not counted, and 0.5 s until idle. Rank 0 alone: 40 passes of 1 s; together
    with rank 1, which needs 100.5 s, of 1.5 s: (60.5 + 100.5) / 2 / 40.5."""
    alone, together = [1000, *[1] * 40], [1000, *[1.5] * 40]
    if rank == 0:
        ranks = TwoRanks(monkeypatch, [[0.0, 100.5]])
        ranks.computes(monkeypatch, [*alone, *together])
    else:
        ranks = TwoRanks(monkeypatch, [[40.5, 100.5]])
        ranks.computes(monkeypatch, together)
    assert network.contention(rank, CPU) == pytest.approx(161 / 2 / 40.5)
    assert ranks.events == ["barrier", *["compute"] * (rank == 0), "barrier", "compute"], "not while one is alone"


def hidden_cost(monkeypatch: pytest.MonkeyPatch, *repeats: tuple[float, float, float]) -> float:
    """repeats: what the other, slower rank needs for an all-reduce, for computing, and for both; before them is one
    that allocates."""
    assert len(repeats) == network.HIDDEN_REPEATS - 1
    monkeypatch.setattr(network, "HIDDEN", 8)
    ranks = TwoRanks(monkeypatch, (seconds for repeat in ((1.0, 1.0, 1e6), *repeats) for seconds in repeat))
    ranks.computes(monkeypatch, iter(lambda: 0.0, None))
    return network.hidden_cost(CPU)


def test_the_cost_of_hiding_is_what_computing_takes_longer_over_the_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of 8: of 4 times 2 s, 3 times 6 s and 90 s: 4 s; 10 s; of 4 times 11 s, 3 times 13 s and 99 s: 12 s."""
    repeats = *[(2.0, 10.0, 11.0)] * 4, *[(6.0, 10.0, 13.0)] * 3, (90.0, 10.0, 99.0)
    assert hidden_cost(monkeypatch, *repeats) == (12 - 10) / 4


@pytest.mark.parametrize(("both", "cost"), [(9.0, 0.0), (10.0, 0.0), (14.0, 1.0), (30.0, 1.0)])
def test_the_cost_of_hiding_is_between_free_and_no_gain(
    monkeypatch: pytest.MonkeyPatch, both: float, cost: float
) -> None:
    assert hidden_cost(monkeypatch, *[(4.0, 10.0, both)] * 8) == cost


def test_computing_beside_an_all_reduce_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `idle` waits for all streams: computing would begin after the all-reduce."""
    events, ranks = list[str](), TwoRanks(monkeypatch, iter(lambda: 1.0, None))
    monkeypatch.setattr(network, "computing", lambda *_: lambda: events.append("pass"))
    monkeypatch.setattr(network, "idle", lambda _: events.append("idle"))

    def all_reduce(*given: Any, async_op: bool = False) -> Any:
        events.append("started" if async_op else "done")
        return SimpleNamespace(wait=lambda: events.append("done")) if async_op else ranks.all_reduce(*given)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    network.hidden_cost(CPU)
    between = [text.split(" done")[0] for text in " ".join(events).split("started ")[1:]]
    assert between == [" ".join(["pass"] * network.PASSES)] * network.HIDDEN_REPEATS
