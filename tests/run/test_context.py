"""From the program's start to the first step: the spans, and the hosts that all ranks exchange. What a rank that hangs
writes of its collectives; tests/report/test_hung_ranks.py reads it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddlbench.config.schema import Config
from ddlbench.ranks.launchers import Launch
from ddlbench.run import context
from ddlbench.run.context import Attempt, save_last_collectives
from tests.support.simulated import World

RUN = "run-of-four"


def test_each_span_is_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([3.0, 7.0, 7.5])
    monkeypatch.setattr(context, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    attempt = Attempt(cast(Config, None), Launch("torchrun"), torch.device("cpu"), started=1.0)
    for name in ("imports_s", "connecting_s", "setup_s"):
        attempt.end_span(name)
    assert attempt.spans == {"imports_s": 2.0, "connecting_s": 4.0, "setup_s": 0.5}


def agreed(monkeypatch: pytest.MonkeyPatch, runs: list[str]) -> list[Attempt]:
    """Four ranks on two hosts, each with the name that it gives the run."""
    world = World(len(runs))
    world.install(monkeypatch)
    host: Any = SimpleNamespace(gethostname=lambda: f"node{world.own.rank // 2}")
    monkeypatch.setattr(context, "socket", host)

    def agree(rank: int) -> Attempt:
        attempt = Attempt(cast(Config, None), Launch("torchrun", rank, 4, rank, 4), torch.device("cpu"))
        attempt.__dict__["run_id"] = runs[rank]
        attempt.agree()
        return attempt

    return world.run(agree)


def test_every_rank_learns_the_hosts_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in agreed(monkeypatch, [RUN] * 4):
        assert attempt.hosts == ["node0", "node0", "node1", "node1"]


def test_every_rank_counts_the_nodes_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of one rank and one of three, of which mpirun says nothing: 4 / 1 and 4 / 3 would be 4 and 2 nodes."""
    world = World(4)
    world.install(monkeypatch)
    launches = [Launch("mpirun", 0, 4, 0, 1, 4), *(Launch("mpirun", rank, 4, rank - 1, 3, 2) for rank in (1, 2, 3))]

    def counted(rank: int) -> int:
        attempt = Attempt(cast(Config, None), launches[rank], torch.device("cpu"))
        attempt.count_nodes()
        return attempt.launch.nodes

    assert world.run(counted) == [2] * 4


def test_each_rank_writes_its_last_collectives(tmp_path: Path) -> None:
    save_last_collectives(tmp_path, 3)
    assert json.loads((tmp_path / "collectives" / "rank-3.json").read_text())["rank"] == 3


def test_a_folder_that_is_gone_is_no_second_failure(tmp_path: Path) -> None:
    """An exception of the thread that writes would print a traceback beside the reason of the hang."""
    save_last_collectives(tmp_path / "gone", 3)
    assert not list(tmp_path.iterdir())
