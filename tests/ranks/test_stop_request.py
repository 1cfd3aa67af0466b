"""What a rank has asked for, and until when it must have happened."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ddlbench.config.schema import Config
from ddlbench.errors import Failure, Stopped, failure_of
from ddlbench.ranks import boundary
from ddlbench.ranks.boundary import StopRequest
from ddlbench.ranks.launchers import Launch
from ddlbench.record.record import Record
from ddlbench.run.context import Attempt

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
