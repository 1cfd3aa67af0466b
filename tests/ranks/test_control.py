"""The harness's own collectives, over gloo, on three real ranks that reach them at different times."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ddlbench.ranks import control
from ddlbench.ranks.control import (
    NO_LIMIT,
    AsyncReduction,
    all_gather,
    barrier,
    from_rank_0,
    gather_to_rank0,
    single_process,
    sum_over_ranks,
    without_timeout,
)
from tests.support.ranks import run_ranks

RANKS = 3


def seen_after_a_barrier(repeat: int) -> list[bool]:
    """Whether each rank had reached a barrier when this rank left it. In each repeat another rank is the last one."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == repeat % RANKS:
        time.sleep(0.5)
    store.set(f"came-{repeat}-{dist.get_rank()}", "")
    barrier()
    return [store.check([f"came-{repeat}-{rank}"]) for rank in range(RANKS)]


def on_each_rank() -> dict[str, Any]:
    rank = dist.get_rank()
    values = torch.tensor([float(rank), 10.0])
    return {
        "alone": single_process(),
        "came": [seen_after_a_barrier(repeat) for repeat in range(RANKS)],
        "gathered": all_gather(("rank", rank)),
        "to_rank_0": gather_to_rank0(rank),
        "from_rank_0": from_rank_0(("rank", rank)),
        "sum": sum_over_ranks(values).tolist(),
        "own": values.tolist(),
        "largest": AsyncReduction(torch.tensor([rank, -rank]), dist.ReduceOp.MAX).result(),
    }


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(RANKS, on_each_rank)


def test_no_rank_leaves_a_barrier_before_the_last_rank_enters_it() -> None:
    for rank in results():
        assert rank["came"] == [[True] * RANKS] * RANKS


def test_values_are_by_rank() -> None:
    for rank in results():
        assert rank["gathered"] == [("rank", 0), ("rank", 1), ("rank", 2)]
        assert rank["from_rank_0"] == ("rank", 0)
        assert not rank["alone"]
    assert [rank["to_rank_0"] for rank in results()] == [[0, 1, 2], [], []]


def test_a_sum_is_of_all_ranks_and_leaves_their_own_values() -> None:
    for number, rank in enumerate(results()):
        assert rank["sum"] == [3.0, 30.0]
        assert rank["own"] == [number, 10.0]
        assert rank["largest"] == [2, 0]


def test_a_single_process_does_not_wait() -> None:
    barrier()
    assert single_process()
    assert all_gather(5) == gather_to_rank0(5) == [from_rank_0(5)] == [5]
    assert sum_over_ranks(torch.tensor([2.0])).tolist() == AsyncReduction(torch.tensor([2.0])).result() == [2.0]


def test_collectives_have_their_timeout_again_after_a_part_without_one(monkeypatch):
    limits = []
    monkeypatch.setattr(control, "single_process", lambda: False)
    monkeypatch.setattr(dist, "set_timeout", limits.append, raising=False)
    with without_timeout(timedelta(seconds=5)):
        assert limits == [NO_LIMIT]
    assert limits == [NO_LIMIT, timedelta(seconds=5)]
