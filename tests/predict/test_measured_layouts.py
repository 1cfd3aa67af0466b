"""--from with several layouts of a framework, of which each has its runs on a few devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddlbench.config.compose import configuration
from ddlbench.oracle.machine.machine import load
from ddlbench.oracle.predictor import Prediction
from ddlbench.oracle.runs import Results
from ddlbench.predict.question import ask
from ddlbench.predict.rows import predictions
from ddlbench.results.reading.attempts import Attempt

WORDS = ("+framework=tensor", "+model=gpt2_small", "model.n_layer=2", "model.n_embd=64", "model.n_head=4",
         "model.vocab_size=256", "model.seq_len=32", "train.global_batch=32")  # fmt: skip
ABCI = load("abci")


def run(tp: int, step_s: float) -> Attempt:
    """A complete run on four V100s of one node, as far as the oracle reads it."""
    asked = configuration(*WORDS)
    framework: Any = asked.framework
    content = {
        "status": "ok",
        "config": replace(asked, framework=replace(framework, dp=4 // tp, tp=tp)).resolved,
        "launch": {"world_size": 4, "device_type": "cuda"},
        "environment": {"gpu_model": ABCI.device.name},
        "ledger": {"global_batch": 32, "data_size": 4 // tp, "micro_batches": 1},
        "summary": {"throughput_samples_per_s": 32 / step_s, "data_wait_share": 0.0},
    }
    return Attempt(Path(f"results/tp{tp}/attempt-1"), content)


def predicted(seconds: dict[int, float], *options: str) -> list[Prediction]:
    """The rows of 4 GPUs. seconds: of a measured step, by tensor parallel ranks"""
    results = Results(Path("results"), [run(tp, step_s) for tp, step_s in seconds.items()])
    return predictions(ask([*WORDS, "cluster=abci", "gpus=4", *options]), ABCI, results)


@pytest.mark.parametrize(("seconds", "fastest"), [({2: 0.5, 4: 0.45}, 4), ({2: 0.45, 4: 0.5}, 2)])
def test_each_layout_is_predicted_from_its_run(seconds: dict[int, float], fastest: int) -> None:
    """A run that a prediction starts from comes back as it was measured."""
    (row,) = predicted(seconds)
    assert row.layout == {"dp": 4 // fastest, "tp": fastest}
    assert row.step_s == pytest.approx(0.45)


def test_a_layout_without_a_run_is_left_out() -> None:
    (row,) = predicted({4: 0.5})
    assert row.layout == {"dp": 1, "tp": 4}
    assert row.step_s == pytest.approx(0.5)


def test_a_plan_starts_from_the_run_of_its_layout_with_the_micro_batch_that_was_measured() -> None:
    """Layouts without a run are no plans. The run had one micro batch of 32, and no recomputation."""
    rows = predicted({4: 0.5}, "--plan")
    assert {row.layout["tp"] for row in rows} == {4}
    keys = ("train.micro_batch", "train.checkpoint_activations")
    seconds = {tuple(row.settings[key] for key in keys): row.step_s for row in rows}
    assert seconds[32, False] == pytest.approx(0.5)
