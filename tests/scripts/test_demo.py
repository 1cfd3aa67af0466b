"""What `make run` shows: the model learns, with one process and with two."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.support.processes import run

ROOT = Path(__file__).parents[2]
CHANCE = 0.1  # ten classes; a model that learned nothing stays near it


@pytest.mark.slow
def test_demo_learns_and_reports(tmp_path):
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
