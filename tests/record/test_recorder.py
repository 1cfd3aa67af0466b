"""What rank 0 writes beside the epochs: marks, the FLOPs that were reached, MFU and HFU, the slow rank of a profiled
window, and the steps of an epoch that did not end. Parts of the start and hosts: tests/test_hand_computed.py."""

from __future__ import annotations

import errno
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from ddlbench.config.schema import Config
from ddlbench.errors import RunError
from ddlbench.job import Place
from ddlbench.loop import Run
from ddlbench.measure.clock import EpochClock
from ddlbench.measure.profiling.profile import RankWindow, Seconds
from ddlbench.progress import Progress
from ddlbench.record.record import Record
from ddlbench.record.recorder import FileRecorder
from ddlbench.record.run_json import model_section
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support.epoch_rows import epoch_row
from tests.support.simulated_run import job_of

A100 = "NVIDIA A100-SXM4-80GB"  # 312 TFLOP/s in bf16, 19.5 in fp32 without TF32
SAID: Any = SimpleNamespace(facts=dict[str, Any], ledger=lambda run, steps: {"samples": steps * 8})


def one_epoch(
    results: Path,
    *words: str,
    computed: float | None = 3e12,
    device: str = "cuda",
    visible: int = 2,
    backend: str = "nccl",
    ranks_per_node: int = 2,
    first_epoch: int = 0,
    ahead: int = 0,
) -> tuple[Record, FileRecorder, Run]:
    """The record of one epoch of 4 steps of 8 samples on 4 A100: 32 samples in 4 s.

    computed: FLOPs with those of second runs
    first_epoch: epochs that earlier attempts trained
    ahead: batches that the loader may have ready
    """
    config, job = job_of(("+framework=ddp", "+model=resnet50", *words), 4)
    job = replace(job, device=torch.device(device, 0), world_size=4, global_batch=8)
    launch = {"world_size": 4, "nodes": 2, "ranks_per_node": ranks_per_node, "device_type": "cuda", "backend": backend}
    content = {
        "config": config.resolved,
        "launch": launch,
        "environment": {"gpu_model": A100, "torch": "2.14.1", "gpu_count": visible},
        "dataset": {"hash": "a" * 64},
    }
    record = Record.open(str(results), "run", content)
    feed = SimpleNamespace(facts=lambda: {"ahead": ahead}, steps_per_epoch=4)
    model = {**model_section(config.model, None), "flops_per_sample": 3e12, "hardware_flops_per_sample": computed}
    files = FileRecorder(record, cast(Config, config), model, SAID, Progress(False))
    run = cast(Run, SimpleNamespace(job=job, place=Place(0, 4), feed=feed, first_epoch=first_epoch, clock=None))
    seconds = {"imports_s": 1.0, "connecting_s": 0.5, "data_preparation_s": 64.0, "setup_s": 2.0}
    files.begin(run, seconds, ["node1", "node1", "node0", "node0"])
    run.clock = EpochClock(torch.device("cpu"), lambda: None)
    files.epoch(run, epoch_row(first_epoch, first_epoch + 1, [1.0] * 4))
    return record, files, run


def begin_epoch(run: Run, ended: int) -> None:
    """Its clock, `ended` steps later."""
    clock = run.clock = EpochClock(torch.device("cpu"), lambda: None)
    for step in clock.steps(range(ended + 2)):
        if step == ended:
            return


def steps_of(record: Record) -> pd.DataFrame:
    return pd.read_parquet(record.folder / "steps.parquet")


@pytest.mark.parametrize(
    ("ranks_per_node", "visible", "backend", "marked"),
    [
        (4, 1, "nccl", True),
        (4, 4, "nccl", False),
        (1, 1, "nccl", False),
        (4, 1, "nccl (shared GPU)", False),
        (4, 0, "gloo", False),
    ],
)
def test_ranks_of_a_node_that_see_one_gpu_each_are_a_mark_and_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks_per_node: int, visible: int, backend: str, marked: bool
) -> None:
    """NCCL may not find NVLink then."""
    record, _, _ = one_epoch(tmp_path, visible=visible, backend=backend, ranks_per_node=ranks_per_node)
    assert record.content["summary"]["marks"] == ("one visible GPU" if marked else None)
    said = capsys.readouterr().err.count("ddlbench: warning: each rank sees one GPU of its node")
    assert said == marked


@pytest.mark.parametrize(
    ("mode", "ahead", "marked"), [("train", 3, False), ("train", 4, True), ("loader", 0, False), ("loader", 1, True)]
)
def test_batches_that_may_be_older_than_the_measured_time_are_a_mark(
    tmp_path: Path, mode: str, ahead: int, marked: bool
) -> None:
    """Sixteen workers had read the eleven batches of an epoch when the first was measured: 7,301 images/s."""
    record, _, _ = one_epoch(tmp_path, f"mode={mode}", ahead=ahead)
    assert record.content["summary"]["marks"] == ("read ahead" if marked else None)


def test_the_only_epoch_of_an_attempt_that_continues_another_one_is_cold(tmp_path: Path) -> None:
    """With a second epoch it is the warm-up."""
    record, files, run = one_epoch(tmp_path / "resumed", first_epoch=1)
    assert record.content["summary"]["marks"] == "cold epoch"
    files.epoch(run, epoch_row(2, 3, [1.0] * 4))
    assert record.content["summary"]["marks"] is None
    assert one_epoch(tmp_path / "single")[0].content["summary"]["marks"] is None


@pytest.mark.parametrize(
    ("words", "computed", "peak", "hfu"),
    [
        ("train.precision=bf16", 3e12, 312e12, 6e12 / 312e12),
        ("train.precision=bf16", 4e12, 312e12, 8e12 / 312e12),  # blocks run again
        ("train.precision=bf16", None, 312e12, None),
        ("train.precision=fp32", 3e12, 19.5e12, 6e12 / 19.5e12),  # the peak outside the tensor cores
        ("train.precision=fp32 train.tf32=true", 3e12, None, None),  # its peak is not known
    ],
)
def test_model_flops_are_those_of_one_gpu(
    tmp_path: Path, words: str, computed: float | None, peak: float | None, hfu: float | None
) -> None:
    """8 samples/s, 2 on each of 4 GPUs, of 3 TFLOP: 6 TFLOP/s. HFU is of the FLOPs that were computed."""
    record, _, _ = one_epoch(tmp_path, *words.split(), computed=computed)
    summary = record.content["summary"]
    assert summary["throughput_samples_per_s"] == 8.0
    assert summary["throughput_samples_per_s_per_gpu"] == 2.0
    assert summary["model_flops_per_s_per_gpu"] == 6e12
    assert (summary["mfu"], summary["hfu"]) == (peak and 6e12 / peak, hfu)


def test_of_an_epoch_that_did_not_end_the_steps_of_rank_0_stay_and_count_nowhere(tmp_path: Path) -> None:
    record, _, run = one_epoch(tmp_path, device="cpu")
    begin_epoch(run, ended=2)
    assert record.finish("killed", "rank 0 received SIGTERM")
    steps = steps_of(record)
    assert steps["complete"].tolist() == [True] * 4 + [False] * 2
    late = steps[~steps["complete"]]
    assert late[["rank", "epoch", "step", "warmup"]].values.tolist() == [[0, 1, 0, True], [0, 1, 1, True]]
    assert late["step_time_s"].min() > 0
    assert late[["loss", "lr"]].isna().to_numpy().all()
    assert len((record.folder / "epochs.jsonl").read_text().splitlines()) == 1
    before = make_tables(read_all([tmp_path]))
    pq.write_table(pq.read_table(record.folder / "steps.parquet").slice(0, 4), record.folder / "steps.parquet")
    after = make_tables(read_all([tmp_path]))
    for table in ("runs", "epochs", "scaling"):
        pd.testing.assert_frame_equal(getattr(after, table), getattr(before, table))
    assert before.runs["epochs_done"].tolist() == [1]


def test_epochs_and_samples_of_a_continued_run_are_those_of_the_whole_training_and_its_times_its_own(
    tmp_path: Path,
) -> None:
    record, files, run = one_epoch(tmp_path, device="cpu", first_epoch=3)
    files.epoch(run, epoch_row(4, 6, [2.0] * 4))
    summary = record.content["summary"]
    assert (summary["epochs_done"], summary["epochs_measured"], summary["epoch_time_s"]) == (5, 2, 6.0)
    assert record.content["ledger"]["samples"] == 5 * 4 * 8
    begin_epoch(run, ended=1)
    record.finish("killed", "rank 0 received SIGTERM")
    assert steps_of(record)["epoch"].tolist() == [3] * 4 + [4] * 4 + [5]


def test_samples_that_could_not_be_read_are_named_in_a_run_that_does_not_end_well(tmp_path: Path) -> None:
    """Those of all ranks up to the last epoch that is recorded."""
    record, files, run = one_epoch(tmp_path, device="cpu")
    for epoch, bad in ((1, ("train/a/1.JPEG",)), (2, ("train/a/1.JPEG", "val/b/2.JPEG"))):
        row = epoch_row(epoch, 4, [1.0] * 4)
        row.ranks = [replace(rank, bad_samples=bad) for rank in row.ranks]
        files.epoch(run, row)
    assert record.finish("killed", "rank 0 received SIGTERM")
    content = json.loads((record.folder / "run.json").read_text())
    assert content["ledger"]["bad_samples"] == 2
    assert content["loader"]["bad_samples"] == ["train/a/1.JPEG", "val/b/2.JPEG"]

    continued = Record.open(str(tmp_path), record.content["run_id"], dict(record.content, loader={}))
    continued.resume({"attempt": 1, "epoch": 3}, record.lines())
    replace(files, record=continued, bad_samples=set()).epoch(run, epoch_row(3, 4, [1.0] * 4))
    assert continued.content["ledger"]["bad_samples"] == 2
    assert continued.content["loader"]["bad_samples"] == ["train/a/1.JPEG", "val/b/2.JPEG"]


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "a long story of the library", str(path))

    _, files, _ = one_epoch(tmp_path, "profile=true", "profile_trace=true", device="cpu")
    with pytest.raises(RunError, match=r"the record in .* cannot be written \(No space left on device\): free space"):
        files.window({"status": "ok"}, full)


def test_an_epoch_that_is_recorded_is_not_kept_twice(tmp_path: Path) -> None:
    """The run ends in the validation after it, or before the next one has ended a step."""
    record, files, run = one_epoch(tmp_path, device="cpu")
    begin_epoch(run, ended=3)
    files.epoch(run, epoch_row(1, 3, [1.0] * 4))
    begin_epoch(run, ended=0)
    assert record.finish("killed", "rank 0 received SIGTERM")
    assert steps_of(record)["complete"].tolist() == [True] * 8


def test_the_thread_that_ends_a_process_asks_no_gpu_for_its_steps(tmp_path: Path) -> None:
    """It may hang with the driver."""
    kept: dict[str, int] = {}
    for device in ("cpu", "cuda"):
        record, _, run = one_epoch(tmp_path / device, device=device)
        begin_epoch(run, ended=1)
        thread = threading.Thread(target=record.finish, args=("timeout", "rank 0: no step ended"))
        thread.start()
        thread.join()
        kept[device] = len(steps_of(record))
    assert kept == {"cpu": 5, "cuda": 4}


def test_steps_that_cannot_be_kept_change_no_end(tmp_path: Path) -> None:
    record, _, run = one_epoch(tmp_path, device="cpu")
    run.clock = cast(EpochClock, SimpleNamespace())  # fails when it is asked
    assert record.finish("killed", "rank 0 received SIGTERM")
    assert json.loads((record.folder / "run.json").read_text())["status"] == "killed"
    assert len(steps_of(record)) == 4


def test_a_window_names_the_slow_rank(tmp_path: Path) -> None:
    record, files, run = one_epoch(tmp_path)
    seconds = [Seconds(4.0, 0.0, 0.0, 0.0, 0.5, exposed_s, exposed_s, 0.5, 0.0) for exposed_s in (3.0, 0.5)]
    lines = [RankWindow(rank, f"node{rank}", 0, 2, of_rank, 1, ()).line() for rank, of_rank in enumerate(seconds)]
    record.add(profile={"status": "ok", "ranks": lines})
    files.end(run, [{"bad_samples": {}}] * 2)
    names = ("own_step_s", "own_step_median_rank_s", "own_step_source", "straggler_rank", "straggler_host")
    assert [record.content["summary"][name] for name in names] == [1.5, 0.875, "window", 1, "node1"]
