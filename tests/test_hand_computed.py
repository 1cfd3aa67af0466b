"""Scripted ranks on clocks that only the script moves: every digit of the tables is computed by hand in the comments.

The loop, the clock, the reduction over ranks, the record and the report are the program's own.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from ddlbench.job import Batch, Place
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support.simulated import RankScript
from tests.support.simulated_run import Scripted

# Two replicas of two tensor-parallel ranks each; 3 epochs of 3 steps of 8 samples, replicas of 4, micro batches of 2.
HYBRID = (
    "+framework=tensor", "framework.dp=2", "framework.tp=2", "+model=resnet50", "train.global_batch=8",
    "train.micro_batch=2", "train.epochs=3", "train.warmup_steps=1",
)  # fmt: skip
# Seconds by rank. `before`: rank 3 is 300 s late at the barrier that opens an epoch.
SCRIPTS = (
    RankScript(
        wait=[[1, 0, 0], [0.25, 0.25, 0.25], [0.25, 0.25, 0.25]], compute=[[8, 1, 1], [1, 1, 1], [1, 1, 1]],
        flush=[0, 0, 0], before=0, validation=2,
    ),
    RankScript(
        wait=[[1, 0, 0], [0.5, 0.5, 0.5], [0.25, 0.25, 0]], compute=[[8, 1, 1], [1, 1, 2.5], [1.5, 1, 1]],
        flush=[0, 0, 0], before=100, validation=1,
    ),
    RankScript(
        wait=[[1, 0, 0], [0.5, 0, 0], [0, 0, 0.5]], compute=[[8, 1, 1], [1, 3, 1], [1, 2.5, 1]],
        flush=[0, 0, 0], before=200, validation=1,
    ),
    RankScript(
        wait=[[1, 0, 0], [0, 0.5, 0], [0, 0, 0]], compute=[[15, 1, 1], [2, 1, 6], [1, 1, 3]],
        flush=[0.5, 0.5, 1], before=300, validation=3,
    ),
)  # fmt: skip
PLACES = tuple(
    Place(rank // 2, 2, reports=rank % 2 == 0, coordinates={"dp": rank // 2, "tp": rank % 2}) for rank in range(4)
)
MEMORY = ((9000, 1000, 1000), (9000, 3000, 1000), (9000, 2000, 4000), (9000, 1500, 1000))


def validation_batch(hits: int, misses: int, padding: int) -> Batch:
    """Scores of two classes; the padding would be a hit."""
    first = torch.tensor([[1.0, 0.0]])
    inputs = torch.cat([first] * (hits + misses + padding))
    targets = torch.tensor([0] * hits + [1] * misses + [0] * padding)
    return Batch(inputs, targets, torch.tensor([True] * (hits + misses) + [False] * padding))


# Replica 0: 2 of 3 hit, replica 1: 2 of 2 and a padded place. 4 of 5; the mean of the replicas' shares is 0.83.
VALIDATION = (*[validation_batch(2, 1, 0)] * 2, *[validation_batch(2, 0, 1)] * 2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    run = Scripted(HYBRID, PLACES, SCRIPTS, MEMORY, VALIDATION, loss=lambda replica, step: 2.0 * replica + step)
    with pytest.MonkeyPatch.context() as patch:
        run.record(folder, patch)
    make_tables(read_all([folder])).write(folder / "tables")
    return folder


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tables" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def chosen(row: dict[str, str], expected: dict[str, str]) -> dict[str, str]:
    return {name: row[name] for name in expected}


# Epoch 0: the opening barrier brings all ranks to 300 s; the first step takes 1 + 8 s, on rank 3 1 + 15 s; the barrier
# after this warm-up step brings all to 16 s; two steps of 1 s, then rank 3 flushes for 0.5 s: 18, 18, 18 and 18.5 s.
# Epoch 1: steps 1.25 1.25 1.25 | 1.5 1.5 3 | 1.5 3 1 | 2 1.5 6, flush 0.5: 3.75, 6, 5.5 and 10 s; waits 0.75 of 3.75,
# 1.5 of 6, 0.5 of 5.5, 0.5 of 10. Epoch 2: steps 1.25 1.25 1.25 | 1.75 1.25 1 | 1 2.5 1.5 | 1 1 3, flush 1: 3.75, 4, 5
# and 6 s; waits 0.75 of 3.75, 0.5 of 4, 0.5 of 5, 0 of 6. Validation: 3 s, by rank 3. Losses: step, and 2 + step.
EPOCHS = (
    {
        "epoch": "0", "warmup": "True", "steps": "3", "samples": "24", "updates": "3",
        "epoch_time_s": "18.5", "epoch_time_fastest_rank_s": "18.0", "epoch_time_median_rank_s": "18.0",
        "straggler_wait_s": "0.5", "host_wait_share": "0.0",
        "measured_steps": "2", "measured_samples": "16", "measured_time_s": "2.5", "data_wait_share": "0.0",
        "train_loss": "2.0", "val_top1": "0.8", "val_samples": "5", "validation_time_s": "3.0", "elapsed_s": "21.5",
        "memory_host_peak_bytes": "9000",
    },
    {
        "epoch": "1", "warmup": "False", "steps": "3", "samples": "24", "updates": "6",
        "epoch_time_s": "10.0", "epoch_time_fastest_rank_s": "3.75", "epoch_time_median_rank_s": "5.75",
        "straggler_wait_s": "6.25", "host_wait_share": "0.25",
        "measured_steps": "3", "measured_samples": "24", "measured_time_s": "10.0", "data_wait_share": "0.25",
        "train_loss": "5.0", "val_top1": "0.8", "val_samples": "5", "validation_time_s": "3.0", "elapsed_s": "34.5",
        "memory_host_peak_bytes": "3000",
    },
    {
        "epoch": "2", "warmup": "False", "steps": "3", "samples": "24", "updates": "9",
        "epoch_time_s": "6.0", "epoch_time_fastest_rank_s": "3.75", "epoch_time_median_rank_s": "4.5",
        "straggler_wait_s": "2.25", "host_wait_share": "0.2",
        "measured_steps": "3", "measured_samples": "24", "measured_time_s": "6.0", "data_wait_share": "0.2",
        "train_loss": "8.0", "val_top1": "0.8", "val_samples": "5", "validation_time_s": "3.0", "elapsed_s": "43.5",
        "memory_host_peak_bytes": "4000",
    },
)  # fmt: skip


def test_epochs_csv_digit_for_digit(results: Path) -> None:
    rows = table(results, "epochs.csv")
    assert [chosen(row, expected) for row, expected in zip(rows, EPOCHS, strict=True)] == list(EPOCHS)


# Epochs 1 and 2: 10 and 6 s, median 8; 48 samples in 16 s: 3 a second (the mean of the epochs' rates is 3.2), a quarter
# of it for each of 4 GPUs. Without the first step of each epoch (at most 2 and 1.75 s) rank 3 takes 8 and 5 s for 32
# samples. Slowest steps 2 3 6 1.75 2.5 3: median 2.75, 95th percentile 6. First step: 16 s.
RUN = {
    "gpus": "4", "global_batch": "8", "replica_batch": "4", "micro_batches": "2", "data_size": "2",
    "epochs_done": "3", "epochs_measured": "2", "warmup_steps": "1", "samples": "72", "updates": "9",
    "epoch_time_s": "8.0", "epoch_time_min_s": "6.0", "epoch_time_max_s": "10.0",
    "throughput_samples_per_s": "3.0", "throughput_samples_per_s_per_gpu": "0.75",
    "step_time_median_s": "2.75", "step_time_p95_s": "6.0", "first_step_s": "16.0",
    "epoch_first_step_s": "1.875", "throughput_steady_samples_per_s": "2.4615384615384617", "host_wait_share": "0.25",
    "data_wait_share": "0.25", "data_wait_mean_share": "0.23125",  # 2.5 and 1.2 of 16 s
    "straggler_wait_s": "6.25", "validation_time_s": "3.0",
    "imports_s": "1.0", "connecting_s": "0.5", "data_preparation_s": "64.0", "setup_s": "2.0", "startup_s": "3.5",
    "train_loss": "8.0", "val_top1": "0.8", "val_samples": "5",
    "memory_host_peak_bytes": "4000", "model_flops_per_s_per_gpu": "3000000000.0", "mfu": "",
}  # fmt: skip


def test_runs_csv_digit_for_digit(results: Path) -> None:
    (row,) = table(results, "runs.csv")
    assert chosen(row, RUN) == RUN


def test_steps_parquet_holds_every_step_of_every_rank(results: Path) -> None:
    (path,) = results.glob("*/attempt-1/steps.parquet")
    steps = pd.read_parquet(path)
    assert len(steps) == 4 * 3 * 3
    for (rank, epoch), result in steps.groupby(["rank", "epoch"]):
        script: Any = SCRIPTS[rank]
        times = [wait + compute for wait, compute in zip(script.wait[epoch], script.compute[epoch], strict=True)]
        assert result["step_time_s"].tolist() == times
        assert result["data_wait_s"].tolist() == script.wait[epoch]
        assert result["warmup"].tolist() == [epoch == 0] * 3


def test_the_record_names_the_hosts_of_all_ranks(results: Path) -> None:
    (path,) = results.glob("*/attempt-1/run.json")
    assert json.loads(path.read_text())["launch"]["hosts"] == ["node0", "node1"]


# One epoch of two steps of 8 samples, three repeats each. Seconds of the epoch, of which the slowest rank counts:
SECONDS = {"single": (16, 32, 64), "ddp": (8, 64, 20)}


def even(seconds: float) -> RankScript:
    return RankScript(wait=[[0, 0]], compute=[[seconds / 2, seconds / 2]], flush=[0])


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Rows of scaling.csv by framework."""
    folder = tmp_path_factory.mktemp("scaling")
    for framework, size in (("single", 1), ("ddp", 2)):
        for repeat, seconds in enumerate(SECONDS[framework]):
            words = (
                f"+framework={framework}", "+model=resnet50", "train.global_batch=8", "train.epochs=1",
                "train.warmup_steps=0", f"train.repeat={repeat}",
            )  # fmt: skip
            places = [Place(rank, size, coordinates={"dp": rank}) for rank in range(size)]
            scripts = [even(seconds / 4), even(seconds)][-size:]  # rank 0 of two is four times as fast
            run = Scripted(words, places, scripts, [[1000]] * size, [validation_batch(1, 0, 0)] * size)
            with pytest.MonkeyPatch.context() as patch:
                run.record(folder, patch)
    make_tables(read_all([folder])).write(folder / "tables")
    return {row["framework"]: row for row in table(folder, "scaling.csv")}


# Seconds a sample: 1, 2, 4, median 2; with two ranks 0.5, 4, 1.25, median 1.25: speedup 2 / 1.25. The mean of the
# ratios repeat by repeat is 1.9; without the slowest repeat of each the speedup is 1.5 / 0.875.
SINGLE = {
    "scaling": "strong", "runs_ok": "3", "interval": "n=3, no 95 % CI", "epoch_time_s": "32.0", "sample_time_s": "2.0",
    "throughput_samples_per_s": "0.5", "throughput_samples_per_s_per_gpu": "0.5", "step_time_median_s": "16.0",
    "speedup": "1.0", "efficiency": "1.0",
    "model_flops_per_s_per_gpu": "2000000000.0",
}  # fmt: skip
TWO = {
    "scaling": "strong", "runs_ok": "3", "interval": "n=3, no 95 % CI", "epoch_time_s": "20.0", "sample_time_s": "1.25",
    "throughput_samples_per_s": "0.8", "throughput_samples_per_s_per_gpu": "0.4", "step_time_median_s": "10.0",
    "speedup": "1.6", "efficiency": "0.8", "sample_time_low_s": "", "epoch_time_high_s": "", "speedup_low": "",
    "best_single_framework": "single", "best_single_sample_time_s": "2.0", "best_single_epoch_time_s": "32.0",
    "model_flops_per_s_per_gpu": "1600000000.0",
}  # fmt: skip


def test_scaling_csv_digit_for_digit(scaling: dict[str, dict[str, str]]) -> None:
    assert chosen(scaling["single"], SINGLE) == SINGLE
    assert chosen(scaling["ddp"], TWO) == TWO
