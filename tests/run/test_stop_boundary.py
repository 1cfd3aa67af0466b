"""All ranks stop at one boundary, whenever one asks and however far apart they are."""

from __future__ import annotations

import random
import re
import threading
import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddlbench.errors import Failure, Stopped
from ddlbench.ranks.boundary import Boundary, StopRequest
from ddlbench.run.peers import STOP, Peers
from tests.support.ranks import run_ranks

ASK = Failure("timeout", "rank 1 reached the time limit", 8, 1)


def test_a_rank_that_has_announced_passes_no_boundary_before_the_answer() -> None:
    stop, passed = StopRequest(0), threading.Event()
    assert stop.announce(ASK) == 0

    def main_thread() -> None:
        stop.pass_boundary("")
        passed.set()

    thread = threading.Thread(target=main_thread, daemon=True)
    thread.start()
    assert not passed.wait(0.2)
    stop.decide(2)
    assert passed.wait(60)
    with pytest.raises(Stopped):
        stop.pass_boundary("")


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_wait_for_each_other_stop_at_one_boundary(seed: int) -> None:
    """Rank r cannot be more than `lead` boundaries ahead of another, as where hosts run ahead of their devices; each
    announces at a moment of its own."""
    draw = random.Random(seed)
    lead, ranks = draw.randint(1, 3), [StopRequest(0) for _ in range(4)]
    moved, ended = threading.Condition(), dict[int, int]()

    def train(own: StopRequest, rank: int) -> None:
        try:
            while own.passed < 10_000:
                with moved:  # the collectives of a step
                    done = moved.wait_for(lambda: own.passed < min(each.passed for each in ranks) + lead, timeout=60)
                assert done, "deadlock"
                own.pass_boundary("")
                with moved:
                    moved.notify_all()
        except Stopped:
            ended[rank] = own.passed

    threads = [threading.Thread(target=train, args=(stop, rank), daemon=True) for rank, stop in enumerate(ranks)]
    for thread in threads:
        thread.start()
    announced: list[int] = []
    for stop in draw.sample(ranks, len(ranks)):
        time.sleep(draw.random() / 200)
        announced.append(stop.announce(ASK))
    for stop in draw.sample(ranks, len(ranks)):
        stop.decide(max(announced) + 1)
        time.sleep(draw.random() / 500)
    for thread in threads:
        thread.join(60)
    assert ended == dict.fromkeys(range(4), max(announced) + 1)


@cache
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, every_case)


def every_case() -> dict[str, tuple[str, int]]:
    """Where a run stops that rank 1 asks to stop in an epoch, in a validation and between epochs; one after another,
    as three runs: the store's keys are other ones each time."""
    store: Any = dist.distributed_c10d._get_default_store()
    return {name: stopped(dist.PrefixStore(name, store), name) for name in ("epoch", "validation", "between")}


def stopped(store: Any, phase: str) -> tuple[str, int]:
    stop = StopRequest(0)
    peers = Peers(store.clone(), dist.get_rank(), 2, stop)
    boundary = Boundary(torch.device("cpu"), stop=stop.pass_boundary, every=4)
    try:
        boundary.begin(0, 40)
        for step in range(100_000):
            if step == 5 and dist.get_rank() == 1:
                peers.first(STOP, ASK)
            dist.all_reduce(torch.ones(1))  # ranks in step, as in training
            one_boundary(boundary, phase)
    except Stopped as error:
        return str(error), stop.passed
    finally:
        dist.barrier()
        peers.close()
    raise AssertionError("the run was not stopped")


def one_boundary(boundary: Boundary, phase: str) -> None:
    match phase:
        case "epoch":
            boundary.pass_step(torch.tensor(1.0))
        case "validation":
            boundary.heartbeat()
        case _:
            boundary.begin(0, 40)


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        ("epoch", r"after step \d+ of epoch 0"),
        ("validation", "after the last step of epoch 0"),
        ("between", "before epoch 0"),
    ],
)
def test_one_rank_asks_and_both_stop_at_the_same_boundary(phase: str, where: str) -> None:
    (first, boundary), (second, other) = (result[phase] for result in two_ranks())
    assert first == second
    assert first.startswith("rank 1 reached the time limit; stopped ")
    assert re.search(f"{where}$", first)
    assert boundary == other > 5
