"""The last collectives of ranks that hang, in files beside the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddlbench.errors import UserError
from ddlbench.report.explain import explain
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support.faults import end, patience_s, start


def test_a_rank_that_hangs_is_behind_the_rank_that_waits_for_it(tmp_path: Path) -> None:
    _, said = end(start(tmp_path, "hang", "+framework.on=1", f"train.timeout_s={patience_s()}"))
    files = sorted(tmp_path.glob("*/attempt-1/collectives/rank-*.json"))
    assert [file.name for file in files] == ["rank-0.json", "rank-1.json"], said
    waiting, behind = (json.loads(file.read_text())["collectives"][-1] for file in files)
    assert waiting["group"] == behind["group"]
    assert waiting["sequence"] > behind["sequence"]
    assert behind["done"]
    assert waiting["operation"] == "gloo:all_reduce"
    records = read_all([tmp_path])
    with pytest.raises(UserError, match=r"rank 1 on .* last began .*; rank 0 on .* last began gloo:all_reduce"):
        explain(make_tables(records), records, records.attempts[0].name)
