"""From the program's start to the first step: the spans, and the hosts that all ranks exchange. Ranks with other
versions or settings are found before anything is measured, in two real processes. What a rank that hangs writes of its
collectives; tests/report/test_explain.py reads it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.ranks.launchers import Launch
from ddlbench.run import context
from ddlbench.run.context import Attempt, compare_environments, save_last_collectives
from tests.support.ranks import run_ranks
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


SAME: dict[str, Any] = {
    "driver": "550.54", "nccl": "2.28.9", "packages": {"deepspeed": "0.19.8", "torch": "2.14.1"}, "variables": {},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {  # what rank 1 has instead
    "same": {},
    "a version": {"packages": {"deepspeed": "0.18.1", "torch": "2.14.1"}},
    "a library of torch": {"nccl": "2.27.5"},
    "not installed": {"packages": {"torch": "2.14.1"}},
    "a setting": {"variables": {"NCCL_ALGO": "Ring"}, "driver": "560.1"},
    "its own job": {"variables": {"SLURM_PROCID": "1", "CUDA_VISIBLE_DEVICES": "1"}, "hostname": "other"},
}


def compare_each() -> dict[str, tuple[str, Any]]:
    result: dict[str, tuple[str, Any]] = {}
    for name, other in CASES.items():
        try:
            result[name] = ("lines", compare_environments(SAME | (other if dist.get_rank() == 1 else {})))
        except UserError as error:
            result[name] = ("error", str(error))
    return result


def test_ranks_that_differ_are_named_on_every_rank():
    one, two = run_ranks(2, compare_each)
    host = socket.gethostname()
    assert one == two
    assert one["same"] == ("lines", [])
    assert one["its own job"] == ("lines", [])
    assert one["a version"] == (
        "error",
        f"rank 1 on {host} has deepspeed 0.18.1, rank 0 on {host} has 0.19.8: install the same versions on every host",
    )
    kind, library = one["a library of torch"]
    assert kind == "error"
    assert f"rank 1 on {host} has nccl 2.27.5, rank 0 on {host} has 2.28.9: install the same versions" in library
    assert "rank 1 on" in one["not installed"][1]
    assert "has deepspeed none, rank 0" in one["not installed"][1]
    assert one["a setting"] == (
        "lines",
        [
            f"rank 1 on {host} has driver 560.1, rank 0 on {host} has 550.54",
            f"rank 1 on {host} has NCCL_ALGO Ring, rank 0 on {host} has none",
        ],
    )


def test_one_process_has_nothing_to_compare():
    assert compare_environments(SAME) == []


def test_ranks_with_a_third_value_are_not_counted_with_the_second(monkeypatch: pytest.MonkeyPatch):
    drivers = ["1", "2", "3", "2", None]
    answers = iter([range(5), [("n1", {"driver": driver} if driver else {}) for driver in drivers]])
    monkeypatch.setattr(context, "all_gather", lambda _: next(answers))
    line = "rank 1 on n1 (as 1 more) has driver 2, rank 0 on n1 has 1; 2 more have other values"
    assert compare_environments(SAME) == [line]


def test_many_differences_are_counted(monkeypatch: pytest.MonkeyPatch):
    """The answers of 3 ranks, as all_gather would return them."""
    other = {f"packages.p{n}": "2" for n in range(8)}
    mine = {f"packages.p{n}": "1" for n in range(8)}
    answers = iter([["a", "b", "b"], [("n1", mine), ("n2", other), ("n2", other)]])
    monkeypatch.setattr(context, "all_gather", lambda _: next(answers))
    with pytest.raises(UserError, match=r"rank 1 on n2 \(as 1 more\) has p0 2.*; and 3 more differences: install"):
        compare_environments(SAME)
