"""What a rank has asked for, and until when it must have happened. All ranks stop at one boundary, whenever one asks
and however far apart they are."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ddlbench.config.schema import Config
from ddlbench.errors import Failure, Stopped, failure_of
from ddlbench.ranks import boundary
from ddlbench.ranks.boundary import Boundary, StopRequest
from ddlbench.ranks.launchers import Launch
from ddlbench.record.record import Record
from ddlbench.run.context import Attempt
from ddlbench.run.peers import STOP, Peers
from tests.support.ranks import run_ranks

SIGNAL = Failure("killed", "rank 0 received SIGTERM", 143, 0, doubtful=True)
CPU = torch.device("cpu")


def begun() -> StopRequest:
    made = StopRequest(0)
    made.pass_boundary("before an epoch")
    return made


def test_nobody_can_ask_before_the_first_boundary_or_twice() -> None:
    assert not StopRequest(0).can_send()
    made = begun()
    assert made.can_send()
    made.send(SIGNAL, None)
    assert not made.can_send()


def test_a_rank_alone_stops_at_its_next_boundary(capsys: pytest.CaptureFixture[str]) -> None:
    made = begun()
    assert made.received() is None
    made.send(SIGNAL, None)
    assert made.received() == Failure("killed", "rank 0 received SIGTERM", 143, 0)
    assert made.received() is None  # once
    with pytest.raises(Stopped) as stopped:
        made.pass_boundary("after step 3")
    ended = failure_of(stopped.value, rank=0)
    assert ended == Failure("killed", "rank 0 received SIGTERM; stopped after step 3", 143, 0)
    said = capsys.readouterr().err
    assert said == (
        "ddlbench: rank 0 received SIGTERM: all ranks stop after this step; a second signal ends the run at once\n"
    )


def test_two_signals_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun()
    assert not made.same_signal()
    made.send(SIGNAL, None)
    assert made.same_signal()
    monkeypatch.setattr(boundary, "ONE_SIGNAL_S", 0.0)
    assert not made.same_signal()


def test_the_time_limit_is_reached_once() -> None:
    assert StopRequest(0).limit_reached() is None
    assert StopRequest(0, 1000, time.perf_counter()).limit_reached() is None
    made = StopRequest(3, 5, time.perf_counter() - 6)
    reason = "rank 3 reached the time limit of 5 s (train.time_limit_s)"
    assert made.limit_reached() == Failure("timeout", reason, 8, 3, doubtful=True, ended_by="time_limit")
    assert made.limit_reached() is None


def test_a_time_limit_does_not_cut_short_a_stop_that_was_requested_before() -> None:
    made = StopRequest(0, 5, time.perf_counter() - 6)
    made.passed = 3
    made.send(SIGNAL, None)
    assert made.limit_reached() is None


@pytest.mark.parametrize("ended_by", ["time_limit", "signal", None])
def test_what_ended_the_run_gets_into_the_record_of_a_rank_that_stopped(tmp_path: Path, ended_by: str | None) -> None:
    made = begun()
    made.send(replace(SIGNAL, ended_by=ended_by), None)
    asked = made.received()
    assert asked is not None
    assert asked.ended_by == ended_by
    with pytest.raises(Stopped) as stopped:
        made.pass_boundary("after step 3")
    attempt = Attempt(cast(Config, SimpleNamespace(progress=False, results_dir=".")), Launch("alone"), CPU)
    attempt.record = Record.open(str(tmp_path), "run", {})
    attempt.record_end(failure_of(stopped.value, rank=0))
    assert json.loads((attempt.record.folder / "run.json").read_text())["ended_by"] == ended_by


def test_ranks_that_do_not_agree_or_do_not_come_are_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun()
    assert not made.overdue(None)
    made.send(SIGNAL, None)
    made.at = None  # the other ranks have not answered
    assert not made.overdue(None)
    monkeypatch.setattr(boundary, "AGREE_S", 0.0)
    assert made.overdue(None)
    made.at = 5
    assert not made.overdue(None)
    monkeypatch.setattr(boundary, "STOP_S", 0.0)
    assert made.overdue(None)


def test_while_the_ranks_connect_the_end_waits_for_the_store_and_no_longer_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = StopRequest(0)
    made.hold(SIGNAL)
    assert made.overdue(None) is None
    assert made.overdue(0.25) == SIGNAL
    monkeypatch.setattr(boundary, "REACH_S", 0.0)
    assert made.overdue(None) == SIGNAL


def test_a_main_thread_that_comes_to_the_boundary_gets_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun()
    other = Failure("killed", "rank 1 received SIGTERM; stopped after step 3", 143, 1)
    assert not made.main_thread_is_coming(other)  # no boundary was agreed on here
    made.at = 5
    assert made.main_thread_is_coming(other)
    assert not made.main_thread_is_coming(SIGNAL)  # which ended at once
    monkeypatch.setattr(boundary, "BEHIND_S", -1.0)
    made.wait_until = float("inf")
    assert not made.main_thread_is_coming(other)


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


PHASES: dict[str, Callable[[Boundary], None]] = {
    "epoch": lambda passed: passed.pass_step(torch.tensor(1.0)),
    "validation": lambda passed: passed.heartbeat(),
    "between": lambda passed: passed.begin(0, 40),
}


@cache
def two_ranks() -> list[dict[str, tuple[str, int]]]:
    """Where a run stops that rank 1 asks to stop in each phase; one after another, as three runs."""
    return run_ranks(2, in_each_phase)


def in_each_phase() -> dict[str, tuple[str, int]]:
    return {phase: stopped_in(phase) for phase in PHASES}


def stopped_in(phase: str) -> tuple[str, int]:
    store: Any = dist.distributed_c10d._get_default_store()
    own: Any = dist.PrefixStore(phase, store)  # the keys are other ones each time
    stop = StopRequest(0)
    peers = Peers(own.clone(), dist.get_rank(), 2, stop)
    passed = Boundary(CPU, stop=stop.pass_boundary, every=4)
    try:
        passed.begin(0, 40)
        for step in range(100_000):
            if step == 5 and dist.get_rank() == 1:
                peers.first(STOP, ASK)
            dist.all_reduce(torch.ones(1))  # ranks in step, as in training
            PHASES[phase](passed)
    except Stopped as error:
        return str(error), stop.passed
    finally:
        dist.barrier()
        peers.close()
    raise AssertionError("the run was not stopped")


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        ("epoch", r"after step \d+ of epoch 0"),
        ("validation", "after the last step of epoch 0"),
        ("between", "before epoch 0"),
    ],
)
def test_one_rank_asks_and_both_stop_at_the_same_boundary(phase: str, where: str) -> None:
    (first, passed), (second, other) = (result[phase] for result in two_ranks())
    assert first == second
    assert first.startswith("rank 1 reached the time limit; stopped ")
    assert re.search(f"{where}$", first)
    assert passed == other > 5
