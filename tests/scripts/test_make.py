"""The scripts of `make run`, where the model learns with one process and with two, and of `make papers`."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.support.processes import program, run

ROOT = Path(__file__).parents[2]
CHANCE = 0.1  # ten classes; a model that learned nothing stays near it


@pytest.mark.slow
def test_demo_learns_and_reports(tmp_path: Path) -> None:
    done = run(ROOT / "scripts" / "demo.sh", RESULTS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    runs = pd.read_csv(tmp_path / "report" / "tables" / "runs.csv")
    assert sorted(zip(runs.framework, runs.gpus, runs.status, strict=True)) == [("ddp", 2, "ok"), ("single", 1, "ok")]
    for path in tmp_path.glob("*/attempt-1/epochs.jsonl"):
        first, *_, last = (json.loads(line) for line in path.read_text().splitlines())
        assert last["train_loss"] < 0.85 * first["train_loss"]
        assert last["val_loss"] < 0.85 * first["val_loss"]
        assert last["val_top1"] > 2.5 * CHANCE
    assert {"accuracy_by_epoch.png", "speedup.png"} <= {path.name for path in (tmp_path / "report/figures").iterdir()}
    assert "not as published" in done.stdout


@pytest.mark.parametrize(("code", "ended", "sweeps"), [(130, 130, 1), (1, 0, 5)])
def test_ctrl_c_of_a_sweep_of_a_paper_ends_all_and_failed_cells_do_not(
    tmp_path: Path, code: int, ended: int, sweeps: int
) -> None:
    """The sweep itself ends with 130: the shell sees no process that a signal has ended."""
    script = program(tmp_path / "scripts/papers.sh", (ROOT / "scripts/papers.sh").read_text())
    (tmp_path / "results").mkdir()
    text = f"echo $2 >> called\nmkdir -p results/papers results/$3\n[ $2 != ddlbench.sweep ] || exit {code}\n"
    program(tmp_path / ".venv/bin/python", f"#!/bin/bash\n{text}")
    assert run(script).returncode == ended
    assert (tmp_path / "called").read_text().split().count("ddlbench.sweep") == sweeps
