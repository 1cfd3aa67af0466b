"""breakdown.csv by hand, from made records to the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ddlbench.results.tables.scaling import PARTS, breakdown
from tests.support.records import tables_of, write_run


def window(steps: int, window_s: float, **seconds: float) -> dict[str, Any]:
    """The section `profile` of a record: seconds over all ranks, by name of their share."""
    shares = {f"{name}_share": seconds.get(name, 0.0) / window_s for name in PARTS}
    assert sum(shares.values()) == pytest.approx(1)
    compute = sum(shares[f"{name}_share"] for name in PARTS[:4])
    shares |= {"compute_share": compute, "comm_share": shares["comm_exposed_share"] + 0.1}
    return {"profile": {"status": "ok", "steps": steps, "window_s": window_s, "step_s": 0.0, **shares}}


def test_shares_by_gpu_count_and_the_seconds_of_a_step(tmp_path: Path) -> None:
    one = window(10, 5.0, forward=1, backward=2, update=0.5, data=1, idle=0.5)
    two = window(10, 10.0, forward=2, backward=3, other_compute=0.5, comm_exposed=2.5, data=1, idle=1)
    write_run(tmp_path, gpus=1, sections=one)
    write_run(tmp_path, gpus=2, sections=two)
    write_run(tmp_path, gpus=4)  # without a window
    tables_of(tmp_path).write(tmp_path / "tables")
    result = pd.read_csv(tmp_path / "tables" / "breakdown.csv")
    assert list(result["gpus"]) == [1, 2]
    assert list(result["comm_exposed_share"]) == pytest.approx([0.0, 0.25])
    assert list(result["comm_share"]) == pytest.approx([0.1, 0.35])
    assert list(result["comm_overlap_share"]) == pytest.approx([0.1, 0.1])
    assert list(result["profile_step_time_s"]) == pytest.approx([0.5, 0.5])  # 5 s / 10; 10 s / (2 ranks x 10)
    assert list(result["forward_step_s"]) == pytest.approx([0.1, 0.1])
    assert list(result["backward_step_s"]) == pytest.approx([0.2, 0.15])
    assert list(result["comm_exposed_step_s"]) == pytest.approx([0.0, 0.125])
    assert list(result[[f"{part}_step_s" for part in PARTS]].sum(axis=1)) == pytest.approx([0.5, 0.5])


def test_windows_of_repeats_are_merged_by_their_seconds(tmp_path: Path) -> None:
    """Exposed 1 s of 4 s and 2 s of 16 s make 3 / 20, not the mean or the median of 25 % and 12.5 %. Forward 1 s of 4 s
    would be 1 / 20 of both windows or 1 / 4 of its own, and the parts would not add up to 1. A third repeat has no
    window."""
    lacking = window(8, 16.0, forward=1, comm_exposed=2, idle=13)
    lacking["profile"]["forward_share"] = None
    for repeat, section in enumerate((window(2, 4.0, forward=1, comm_exposed=1, idle=2), lacking, None)):
        write_run(tmp_path, gpus=2, repeat=repeat, sections=section)
    table = tables_of(tmp_path).scaling
    (row,), (parts,) = (made.to_dict("records") for made in (table, breakdown(table)))
    assert pd.isna(row["forward_share"])
    assert row["comm_exposed_share"] == pytest.approx(3 / 20)
    assert row["profile_step_time_s"] == pytest.approx(20 / (2 * 10))
    assert row["profile_windows"] == 2
    assert pd.isna(parts["forward_step_s"])
    assert parts["comm_exposed_step_s"] == pytest.approx(3 / 20)


def test_a_window_that_failed_gives_no_share(tmp_path: Path) -> None:
    failed = {"profile": {"status": "error", "reason": "no communication was seen", "steps": 5, "window_s": 3.0}}
    write_run(tmp_path, gpus=2, status="error", reason="no communication was seen", sections=failed)
    result = tables_of(tmp_path)
    assert breakdown(result.scaling).empty
    assert list(result.runs["status"]) == ["error"]
    assert result.runs["comm_exposed_share"].isna().all()


def test_a_measurement_of_both_kinds_of_scaling_has_one_row(tmp_path: Path) -> None:
    for gpus, batch in ((1, 32), (2, 32), (2, 64)):
        write_run(tmp_path, gpus=gpus, per_gpu=None, global_batch=batch, sections=window(2, 4.0, idle=4))
    result = tables_of(tmp_path)
    assert len(result.scaling) == 4
    rows = breakdown(result.scaling)[["gpus", "global_batch"]]
    assert rows.to_numpy().tolist() == [[1, 32], [2, 32], [2, 64]]
