"""What a rank that hangs writes of its collectives; tests/report/test_explain.py reads it."""

from __future__ import annotations

import json
from pathlib import Path

from ddlbench.run.last_collectives import save_last_collectives


def test_each_rank_writes_a_file(tmp_path: Path) -> None:
    save_last_collectives(tmp_path, 3)
    assert json.loads((tmp_path / "collectives" / "rank-3.json").read_text())["rank"] == 3


def test_a_folder_that_is_gone_is_no_second_failure(tmp_path: Path) -> None:
    """An exception of the thread that writes would print a traceback beside the reason of the hang."""
    save_last_collectives(tmp_path / "gone", 3)
    assert not list(tmp_path.iterdir())
