from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.oracle import Case, measured, table
from ddlbench.config.compose import configuration, configurations
from ddlbench.oracle import network
from ddlbench.oracle.machine import Machine, Sweep
from ddlbench.oracle.results import Results
from ddlbench.report.read import Attempt


def record(case: Case, step_s: float) -> dict[str, Any]:
    """A complete run on the CPU, as far as the oracle reads it."""
    config = configuration(*case.words)
    batch = 8 * case.ranks
    return {
        "status": "ok",
        "config": config.resolved,
        "model": {"name": config.model.name},
        "launch": {"world_size": case.ranks, "device_type": "cpu"},
        "ledger": {"global_batch": batch, "data_size": case.ranks, "micro_batches": 2},
        "summary": {"throughput_samples_per_s": batch / step_s, "data_wait_share": 0.0},
    }


def test_a_row_has_the_measured_median_the_prediction_and_the_signed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process takes 0.5 s, two 1 s beside each other, and an all-reduce nothing: predicted is half of measured."""
    free = Sweep((0.0, 1e12), (0.0, 0.0))

    def known(machine: Machine) -> Machine:
        return Machine("local", machine.device, None, (), False, 2, {2: 1.0}, {("all_reduce", 2): free})

    monkeypatch.setattr(network, "calibrated", known)
    one, two = Case("ddp", "gpt2_small", 1), Case("ddp", "gpt2_small", 2)
    with configurations():
        runs = [record(one, 0.5), record(two, 0.9), record(two, 1.0), record(two, 1.3)]
        results = Results(Path("runs"), [Attempt(Path("runs/a/attempt-1"), run) for run in runs])
        assert measured(results.attempts, two) == pytest.approx([0.9, 1.0, 1.3])
        text = table([two, Case("ddp", "gpt2_small", 4)], results)
    assert "| gpt2_small | ddp | 2 | 1.0000 s | 3 | 0.5000 s | -50.0% | 50.0% |" in text
    assert "| gpt2_small | ddp | 4 | no run | 0 |" in text
    assert "mean accuracy of 1 rows: 50.0%" in text
