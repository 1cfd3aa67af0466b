"""MFU and HFU, and the slow rank of a profiled window, in the record of a run on a GPU with a known peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddlbench.loop import Run
from ddlbench.measure.profiling.profile import RankWindow, Seconds
from ddlbench.progress import Progress
from ddlbench.record.record import Record
from ddlbench.record.recorder import FileRecorder
from tests.support.epoch_rows import epoch_row
from tests.support.simulated_run import job_of

WORDS = ("+framework=ddp", "+model=resnet50", "train.precision=bf16", "train.global_batch=8")
SPANS = {"imports_s": 1.0, "connecting_s": 0.5, "setup_s": 2.0}


def recorder(folder: Path, model: dict[str, Any]) -> tuple[FileRecorder, Run]:
    """The recorder of a run with an A100 (312 TFLOP/s in bf16), whose epoch of 8 samples takes 2 s."""
    config, job = job_of(WORDS)
    content = {"environment": {"gpu_model": "NVIDIA A100-SXM4-80GB"}, "launch": {}}
    subject = SimpleNamespace(facts=dict, ledger=lambda run, steps: {"samples": 8 * steps})
    job = replace(job, device=torch.device("cuda"))
    feed = SimpleNamespace(facts=dict, steps_per_epoch=1)
    files = FileRecorder(Record.open(str(folder), "run", content), config, model, cast(Any, subject), Progress(False))
    return files, cast(Run, SimpleNamespace(job=job, feed=feed, first_epoch=0, clock=None))


@pytest.mark.parametrize(("computed", "hfu"), [(10e12, 40e12 / 312e12), (8e12, 32e12 / 312e12), (None, None)])
def test_recomputed_flops_are_hfu_and_no_mfu(tmp_path: Path, computed: float | None, hfu: float | None) -> None:
    """4 samples a second of 8 TFLOP each, of 10 where blocks run again."""
    model = {"tokens_per_sample": None, "flops_per_sample": 8e12, "hardware_flops_per_sample": computed}
    files, run = recorder(tmp_path, model)
    files.begin(run, SPANS, ["node0"])
    files.epoch(run, epoch_row(0, 1, [2.0]))
    summary = files.record.content["summary"]
    assert summary["mfu"] == 32e12 / 312e12
    assert summary["hfu"] == hfu


def test_a_window_names_the_slow_rank(tmp_path: Path) -> None:
    files, run = recorder(tmp_path, {"tokens_per_sample": None})
    files.begin(run, SPANS, ["node0", "node1"])
    files.epoch(run, epoch_row(0, 1, [2.0]))
    seconds = [Seconds(4.0, 0.0, 0.0, 0.0, 0.5, exposed_s, exposed_s, 0.5, 0.0) for exposed_s in (3.0, 0.5)]
    lines = [RankWindow(rank, f"node{rank}", 0, 2, of_rank, 1, ()).line() for rank, of_rank in enumerate(seconds)]
    files.record.add(profile={"status": "ok", "ranks": lines})
    files.end(run, [{"bad_samples": {}}] * 2)
    summary = files.record.content["summary"]
    assert (summary["own_step_s"], summary["own_step_median_rank_s"], summary["own_step_source"]) == (
        1.5,
        0.875,
        "window",
    )
    assert (summary["straggler_rank"], summary["straggler_host"]) == (1, "node1")
