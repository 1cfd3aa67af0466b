"""How JSON of a record is written."""

from __future__ import annotations

import json
from pathlib import Path

from ddlbench.files import unfinished_path
from ddlbench.record.files import end_for_rank_0, write_json
from tests.support.killed import ended_process


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5]}


def test_what_a_killed_run_was_writing_is_removed_with_its_end_and_not_looked_for_before(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    here = unfinished_path(path, tmp_path).name.split("~")
    here[-2] = str(ended_process().pid)
    leftover = tmp_path / "~".join(here)
    leftover.write_text("half")
    write_json(path, {"status": "running", "times": {}})
    assert leftover.exists()
    assert end_for_rank_0(tmp_path, "killed", "its processes have ended")
    assert not leftover.exists()
