"""Ranks with other versions or settings are found before anything is measured; in two real processes."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ddlbench.errors import UserError
from ddlbench.run.context import compare_environments
from tests.support.ranks import run_ranks

SAME: dict[str, Any] = {"driver": "550.54", "packages": {"deepspeed": "0.19.8", "torch": "2.14.1"}, "variables": {}}
CASES: dict[str, dict[str, Any]] = {  # what rank 1 has instead
    "same": {},
    "a version": {"packages": {"deepspeed": "0.18.1", "torch": "2.14.1"}},
    "not installed": {"packages": {"torch": "2.14.1"}},
    "a setting": {"variables": {"NCCL_ALGO": "Ring"}, "driver": "560.1"},
    "its own job": {"variables": {"SLURM_PROCID": "1", "CUDA_VISIBLE_DEVICES": "1"}, "hostname": "other"},
}


def compare_each() -> dict[str, tuple[str, Any]]:
    import torch.distributed as dist

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


def test_many_differences_are_counted(monkeypatch: pytest.MonkeyPatch):
    """The answers of 3 ranks, as all_gather would return them."""
    import ddlbench.run.context as module

    other = {f"packages.p{n}": "2" for n in range(8)}
    mine = {f"packages.p{n}": "1" for n in range(8)}
    answers = iter([["a", "b", "b"], [("n1", mine), ("n2", other), ("n2", other)]])
    monkeypatch.setattr(module, "all_gather", lambda _: next(answers))
    with pytest.raises(UserError, match=r"rank 1 on n2 \(as 1 more\) has p0 2.*; and 3 more differences: install"):
        compare_environments(SAME)
