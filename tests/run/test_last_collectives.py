"""The last collectives of ranks that hang, in files beside the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddlbench.errors import UserError
from ddlbench.report.explain import explain
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support.faults import end, patience_s, start

PLANTED = 'failing.py", line'  # in the stacks of a rank that is in the planted hang


def hang(results: Path) -> tuple[Path, list[str]]:
    """Rank 1 hangs at its third step: the attempt, and what each rank said. Where the machine is so busy that the
    timeout is over before that step, the run has twice the time."""
    timeout_s = patience_s()
    while True:
        folder = results / f"{timeout_s:g}"
        _, said = end(start(folder, "hang", "+framework.on=1", f"train.timeout_s={timeout_s}"))
        if PLANTED in said[1]:
            (attempt,) = folder.glob("*/attempt-1")
            return attempt, said
        timeout_s *= 2


def test_a_rank_that_hangs_is_behind_the_rank_that_waits_for_it(tmp_path: Path) -> None:
    attempt, said = hang(tmp_path)
    files = sorted(attempt.glob("collectives/rank-*.json"))
    assert [file.name for file in files] == ["rank-0.json", "rank-1.json"], said
    last: list[dict[str, Any]] = [json.loads(file.read_text())["collectives"][-1] for file in files]
    waiting, behind = last
    assert waiting["group"] == behind["group"]
    assert waiting["sequence"] > behind["sequence"]
    assert behind["done"]
    assert waiting["operation"] == "gloo:all_reduce"
    records = read_all([attempt])
    named = r"1 of 2 ranks behind in group .*: rank 1 on .* last began .*; rank 0 on .* last began gloo:all_reduce"
    with pytest.raises(UserError, match=named):
        explain(make_tables(records), records, records.attempts[0].name)
