"""Which rank is behind, from files of last collectives made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddlbench.errors import UserError
from ddlbench.report.hung_ranks import behind

SAME = "all ranks began the same last collectives"


def save(attempt: Path, rank: int, *collectives: tuple[str, str, int]) -> None:
    """collectives: group, operation and sequence number of each"""
    lines: list[dict[str, Any]] = [
        {"group": group, "operation": operation, "sequence": sequence, "message": operation.endswith(("send", "recv"))}
        for group, operation, sequence in collectives
    ]
    (attempt / "collectives").mkdir(exist_ok=True)
    saved = {"rank": rank, "host": "node1", "collectives": lines}
    (attempt / f"collectives/rank-{rank}.json").write_text(json.dumps(saved))


def test_the_rank_with_the_lowest_number_is_behind(tmp_path: Path) -> None:
    save(tmp_path, 0, ("0", "gloo:all_reduce", 4), ("0", "gloo:all_reduce", 5))
    save(tmp_path, 1, ("0", "gloo:all_reduce", 3), ("0", "gloo:barrier", 4))
    save(tmp_path, 2, ("0", "gloo:all_reduce", 5))
    assert behind(tmp_path) == (
        "1 of 3 ranks behind in group 0 of gloo: rank 1 on node1 last began gloo:barrier 4; "
        "rank 0 on node1 last began gloo:all_reduce 5; rank 2 on node1 last began gloo:all_reduce 5"
    )


def test_ranks_at_the_same_collective_are_not_behind(tmp_path: Path) -> None:
    """Both wait in it, or one left it: the numbers do not say which."""
    save(tmp_path, 0, ("0", "gloo:all_reduce", 5))
    save(tmp_path, 1, ("0", "gloo:all_reduce", 5))
    assert behind(tmp_path) == SAME


def test_numbers_of_other_groups_and_backends_and_of_messages_are_not_compared(tmp_path: Path) -> None:
    save(tmp_path, 0, ("0", "nccl:all_reduce", 50), ("0", "gloo:barrier", 2), ("1", "nccl:all_reduce", 7))
    save(tmp_path, 1, ("0", "gloo:barrier", 2), ("2", "nccl:all_reduce", 9), ("0", "nccl:all_reduce", 50))
    save(tmp_path, 2, ("0", "nccl:all_reduce", 50), ("0", "nccl:recv", 3))
    assert behind(tmp_path) == SAME


def test_of_many_ranks_the_first_are_listed(tmp_path: Path) -> None:
    for rank in range(1000):
        save(tmp_path, rank, ("0", "nccl:all_reduce", 6 if rank == 700 else 7))
    said = behind(tmp_path)
    assert said.startswith("1 of 1000 ranks behind in group 0 of nccl: rank 700 on node1")
    assert said.endswith("; and 992 more ranks")


def test_without_files_nothing_is_said_and_a_broken_file_is_named(tmp_path: Path) -> None:
    assert behind(tmp_path) == ""
    (tmp_path / "collectives").mkdir()
    (tmp_path / "collectives/rank-0.json").write_text("[]")
    with pytest.raises(UserError, match=r"rank-0\.json holds no last collectives .*: remove it"):
        behind(tmp_path)
