"""The pre-flight check: what it computes by hand, on two ranks of which one is slow, and in a whole run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddlbench.errors import RunError
from ddlbench.record.record import Record
from ddlbench.run import preflight as module
from ddlbench.run.preflight import Check, preflight, require_sound, section, slow_ranks
from tests.support.disk import no_space
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, epochs, record

CPU = torch.device("cpu")
GOOD = Check(0, "a", "cpu", None, True, 0.010, 0.002)
# Rank 2 takes 25 ms where the median rank, the lower one of an even number, takes 10 ms. Rank 1 reduces longest.
FOUR = [
    GOOD,
    replace(GOOD, rank=1, matmul_s=0.008, all_reduce_s=0.003),
    replace(GOOD, rank=2, host="b", matmul_s=0.025),
    replace(GOOD, rank=3, host="b", matmul_s=0.012, all_reduce_s=0.001),
]


def test_a_rank_is_slow_against_the_median_of_all_and_ends_the_run_beyond_the_limit() -> None:
    expected = "rank 2 on b computes 2.5 times as slowly as the median rank (25.0 ms, 10.0 ms)"
    assert slow_ranks(FOUR, 1.5) == slow_ranks(FOUR, 2.5) == [expected]
    assert slow_ranks(FOUR, 2.6) == slow_ranks([GOOD], 1.5) == []
    for limit in (None, 3.0):
        require_sound(FOUR, limit)
    with pytest.raises(RunError, match=r"rank 2 on b computes 2\.5 times as slowly"):
        require_sound(FOUR, 2.0)


def test_the_slowest_of_many_comes_first_and_the_line_stays_short() -> None:
    many = [replace(GOOD, rank=rank, matmul_s=0.1 + rank / 1000) for rank in range(10)]
    with pytest.raises(RunError, match=r"pre-flight: rank 9 on a .*; rank 5 on a [^;]*; and 5 more: exclude its node"):
        require_sound([*many, *[replace(GOOD, rank=rank) for rank in range(10, 30)]], 4.0)


def test_a_rank_that_computes_wrongly_ends_the_run_in_any_case() -> None:
    with pytest.raises(RunError, match="rank 1 on a computes wrongly"):
        require_sound([GOOD, replace(GOOD, rank=1, correct=False)], None)


def test_the_figures_of_the_record() -> None:
    result = section(FOUR, CPU, slow_ranks(FOUR, 1.5), 0.5)
    assert result["matmul_flops_per_s_min"] == 2 * 512**3 / 0.025
    assert result["matmul_flops_per_s_median"] == 2 * 512**3 / 0.010
    assert result["slowest_factor"] == pytest.approx(2.5)
    assert (result["all_reduce_bytes"], result["all_reduce_s"], result["seconds"]) == (4 * 2**20, 0.003, 0.5)
    alone = section([replace(GOOD, all_reduce_s=None)], CPU, [], 0.5)
    assert (alone["all_reduce_bytes"], alone["all_reduce_s"], alone["slow"]) == (None, None, [])


def checked(folder: str) -> list[Any]:
    """What two ranks say, of which the second is slow: first with a warning alone, then beyond the limit."""
    rank = dist.get_rank()
    fastest = module.fastest
    if rank == 1:
        module.fastest = lambda work, device: 1.0 + 0 * fastest(work, device)
    groups, make = list[Any](), dist.new_group
    dist.new_group = lambda **given: groups.append(make(**given)) or groups[-1]
    record = Record.open(folder, "run", {}) if rank == 0 else None
    launch = SimpleNamespace(rank=rank)
    said: list[Any] = []
    train = SimpleNamespace(timeout_s=60.0)
    for stop in (None, 1.5):
        config = SimpleNamespace(preflight_warn=1.5, preflight_stop=stop, train=train)
        attempt: Any = SimpleNamespace(config=config, launch=launch, device=CPU, record=record, dataset={"hash": "abc"})
        try:
            preflight(attempt)
            said.append(record.content["preflight"] if record else "no record")
        except RunError as error:
            said.append(str(error))
    alive = dist.distributed_c10d._world.pg_map
    assert len(groups) == 2
    assert not any(group in alive for group in groups), "NCCL's communicator would keep its memory"
    return said


def test_a_slow_rank_is_named_in_the_record_and_every_rank_raises_the_same_beyond_the_limit(tmp_path: Path) -> None:
    (first, one), (second, other) = run_ranks(2, checked, str(tmp_path))
    assert [line.partition(" on ")[0] for line in first["slow"]] == ["rank 1"]
    assert first["matmul_flops_per_s_min"] == 2 * 512**3
    assert first["all_reduce_s"] > 0
    assert second == "no record"
    assert one == other
    assert one.startswith("pre-flight: rank 1 on ")
    assert one.endswith("or set preflight_stop=null to run with these ranks")
    rows = json.loads((tmp_path / "run/attempt-1/preflight.json").read_text())["ranks"]
    assert [(row["rank"], row["correct"], row["device"]) for row in rows] == [(0, True, "cpu"), (1, True, "cpu")]
    assert rows[1]["matmul_s"] == 1.0 > rows[0]["matmul_s"] > 0
    assert {(row["torch_version"], row["dataset_hash"]) for row in rows} == {(str(torch.__version__), "abc")}


def test_a_run_records_its_check_and_trains_the_same(ddlbench, tmp_path: Path) -> None:
    """The check is no part of the start-up that is reported, and draws no random numbers."""
    assert ddlbench(*SMALL, "preflight=true")[0] == 0
    content = record(tmp_path)
    assert content["preflight"]["seconds"] <= content["spans"]["preflight_s"]
    parts = sum(content["spans"][name] for name in ("imports_s", "connecting_s", "setup_s"))
    assert content["summary"]["startup_s"] == pytest.approx(parts)
    assert ddlbench(*SMALL, "results_dir=without")[0] == 0
    other = record(tmp_path / "without")
    assert other["run_id"] == content["run_id"]
    losses = [[line["train_loss"] for line in epochs(tmp_path / folder)] for folder in ("results", "without")]
    assert losses[0] == losses[1]
    assert "preflight" not in other


def test_a_full_disk_is_one_line(ddlbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "write_json", no_space)
    code, said = ddlbench(*SMALL, "preflight=true", "progress=false")
    assert code == 1
    assert "preflight.json cannot be written (No space left on device): free space" in said
    assert "Traceback" not in said
