"""Heartbeats and the first failure, over a real store: each rank is one `Peers` here; a dead rank is a closed one."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from ddlbench.errors import Failure
from ddlbench.ranks.launchers import free_port
from ddlbench.run import peers
from ddlbench.run.peers import ANSWER_S, Peers
from tests.support.ranks import Forked
from tests.support.waiting import WITHIN_S, wait_until

OPEN: list[Peers] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """A thread within the store would disturb the interpreter's end."""
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)


@pytest.fixture
def held() -> Iterator[tuple[Forked, TCPStore]]:
    """A store in another process, and a connection to it."""
    port = free_port()
    holder = Forked(hold, port)
    try:
        yield holder, TCPStore("127.0.0.1", port, is_master=False)
    finally:
        holder.kill()
        holder.communicate()


def hold(port: int) -> int:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(600)
    del store
    return 0


def ranks_of(store: TCPStore, world: int) -> list[Peers]:
    """All ranks, each heard of once."""
    ranks = [Peers(store.clone(), rank, world) for rank in range(world)]
    OPEN.extend(ranks)
    wait_until(lambda: len(ranks[0]._beats(range(world)) or {}) == world)
    return ranks


def test_the_failure_that_was_posted_first_counts(store: TCPStore) -> None:
    one, two = ranks_of(store, 2)
    first = Failure("oom", "rank 1: out of memory", 7, rank=1)
    assert two.post(first) == first
    assert one.post(Failure("error", "rank 0: connection closed", 1, rank=0)) == first
    wait_until(lambda: one.failure == two.failure == first)
    assert not one.recorded
    one.tell_recorded()
    wait_until(lambda: two.recorded)
    assert one.readers() == 0
    assert two.readers(more=1) == one.readers() == 1


def test_the_rank_that_sends_no_more_heartbeats_is_named_and_no_other(store: TCPStore) -> None:
    one, two, three = ranks_of(store, 3)
    assert one.find_cause() is None
    three.close()
    assert (one.find_cause() or "").startswith("rank 2 (")
    wait_until(lambda: two.lost_contact(4 * two.period_s))  # rank 1 listens to rank 2 all the time
    assert three.lost_contact(600) is None
    two.post(Failure("error", "rank 1: its own", 1, rank=1))
    wait_until(lambda: one.failure)
    assert one.find_cause() is None  # a failure that was posted says more


class Counting:
    """A store that remembers whose heartbeats were asked for."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.asked: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked |= {int(key.rpartition("/")[2]) for key in keys}
        return self.store.multi_get(keys)


def test_in_a_run_that_hangs_rank_0_alone_asks_for_all_ranks(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks look for the cause at once: else N ranks would ask one store for N heartbeats each."""
    monkeypatch.setattr(peers, "REPORT_S", WITHIN_S)
    stores = [Counting(store.clone()) for _ in range(12)]
    ranks = [Peers(counting, rank, 12) for rank, counting in enumerate(stores)]
    OPEN.extend(ranks)
    wait_until(lambda: len(ranks[0]._beats(range(12)) or {}) == 12)
    ranks[7].close()
    for counting in stores:
        counting.asked.clear()

    def look(one: Peers) -> str | None:
        cause = one.find_cause()
        one.post(Failure("timeout", cause or "none", 8, rank=one.rank))
        return cause

    living = [one for one in ranks if one.rank != 7]
    with ThreadPoolExecutor(len(living)) as pool:
        causes = dict(zip([one.rank for one in living], pool.map(look, living), strict=True))
    assert {rank for rank, cause in causes.items() if cause} <= {0, 6}
    wait_until(lambda: ranks[3].failure is not None)
    assert ranks[3].failure is not None
    assert ranks[3].failure.reason.startswith("rank 7 (")
    for rank in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11):
        assert stores[rank].asked == {(rank + 1) % 12}
    assert stores[0].asked == set(range(1, 12))


def test_in_a_large_run_a_rank_waits_until_it_can_have_read_what_rank_0_found(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slower heartbeats the cause is found and read later, and no rank may ask for all heartbeats before."""
    one = Peers(store.clone(), 500, 1024)
    one.close()
    clock, asked = [0.0], list[list[int]]()

    def wait(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > one.silence_s + 1.9 * one.period_s:  # one to find it, one to read it
            one.failure = Failure("error", "rank 700 ended without a message", 1, rank=0)

    def beats(ranks: list[int]) -> dict[int, str]:
        asked.append(ranks)
        return dict.fromkeys(ranks, f"{clock[0]}")

    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=wait))
    monkeypatch.setattr(one, "_beats", beats)
    assert one.find_cause() is None
    assert {tuple(ranks) for ranks in asked} <= {(501,), ()}


def test_a_rank_whose_peers_find_nothing_asks_for_all_ranks(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost rank is not its next one, and neither rank 0 nor the neighbour has failed."""
    ranks = ranks_of(store, 4)
    ranks[1].close()
    monkeypatch.setattr(peers, "SILENCE_S", 1.0)
    monkeypatch.setattr(peers, "REPORT_S", 0.0)
    assert (ranks[2].find_cause() or "").startswith("rank 1 (")


def test_a_store_that_does_not_answer_keeps_nobody_waiting(held: tuple[Forked, TCPStore]) -> None:
    holder, store = held
    one, _ = ranks_of(store, 2)
    failure = Failure("timeout", "rank 0: no step ended", 8, rank=0)
    holder.send_signal(signal.SIGSTOP)
    assert (one.find_cause() or "").startswith("rank 0, which holds the rendezvous store, does not answer")
    assert one.post(failure) == failure
    began = time.monotonic()
    for _ in range(20):  # once it is known, no answer is waited for
        assert one.post(failure) == failure
    assert time.monotonic() - began < 20 * ANSWER_S
    assert not one.lost
    holder.kill()
    wait_until(lambda: one.lost)
    assert one.find_cause() == "rank 0, which held the rendezvous store, ended without a message"
    assert one.post(failure) == failure
