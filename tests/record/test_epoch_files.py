"""The rows of steps.parquet and ranks.parquet, and what it takes rank 0 to write those of a thousand ranks."""

from __future__ import annotations

import json
import math
import pickle
import time
import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.devices.memory import PEAKS
from ddlbench.measure.devices.meter import Use
from ddlbench.measure.rows import EpochRow, RankEpoch
from ddlbench.record.record import Record, step_table
from tests.support.epoch_rows import MEMORY, epoch_row

REPORTING = RankEpoch(
    2, 1, EpochTimes(6.0, 3.0, 0.5, 1, [3.0, 1.0, 2.0], [0.75, 0.25, 0.5], [0.625, 0.125, 0.0]),
    [4.0, math.nan, 2.0], [0.5, 0.25, 0.125], MEMORY,
)  # fmt: skip
SILENT = replace(REPORTING, rank=3, losses=[])
TIMES = {
    "step": [0, 1, 2], "step_time_s": [3.0, 1.0, 2.0], "data_wait_s": [0.75, 0.25, 0.5],
    "host_wait_s": [0.625, 0.125, 0.0], "data_rank": [1, 1, 1],
}  # fmt: skip


def test_every_step_of_every_rank_is_a_row() -> None:
    row = epoch_row(1, 2, [1.0]).with_ranks([REPORTING, SILENT])
    result = pa.concat_tables([step_table(row.epoch, rank, row.warmup) for rank in row.ranks]).to_pydict()
    assert result == {
        **{name: values * 2 for name, values in TIMES.items()},
        "rank": [2, 2, 2, 3, 3, 3],
        "epoch": [1] * 6,
        "lr": [0.5, 0.25, 0.125] * 2,
        "loss": [4.0, None, 2.0, None, None, None],  # of the rank that reports for its replica, where it is a number
        "warmup": [True, False, False] * 2,
        "complete": [True] * 6,
    }
    assert step_table(0, REPORTING, warmup=True)["warmup"].to_pylist() == [True] * 3, "of a warm-up epoch all steps are"


def test_steps_of_an_epoch_that_was_interrupted_count_nowhere() -> None:
    result = step_table(3, replace(REPORTING, losses=[], rates=[]), warmup=True, complete=False).to_pydict()
    assert {name: result[name] for name in TIMES} == TIMES
    assert (result["warmup"], result["complete"], result["epoch"]) == ([True] * 3, [False] * 3, [3] * 3)
    assert result["loss"] == result["lr"] == [None] * 3


USE = Use(
    9.0, True, 60.0, "nvml", 7.5, clock_before_mhz=1980, clock_after_mhz=1410, throttled=("board limit", "power cap"),
    sent_bytes=640,
)  # fmt: skip


def rank_epoch(rank: int) -> RankEpoch:
    """1 s a step, rank milliseconds more in the first, a warm-up; a pipeline of two stages with two parts each."""
    step_s = array("d", [1.0 + rank / 1000, 1.0])
    times = EpochTimes(sum(step_s), 1.0, 0.5, 1, step_s, [0.25] * 2, [0.75] * 2, 0.0, (), USE)
    place = {"dp": 0, "tp": rank % 2, "pp": rank // 2}
    return RankEpoch(rank, 0, times, (), [0.1] * 2, MEMORY, 16 if rank == 2 else None, f"node{rank // 2}", place)


def test_each_rank_and_epoch_is_a_row(tmp_path: Path) -> None:
    record = Record.open(str(tmp_path), "run", {})
    for epoch in range(2):
        row = epoch_row(epoch, 2, [1.0, 1.0]).with_ranks([rank_epoch(rank) for rank in range(4)])
        record.epoch(row)
    assert len(pd.read_parquet(record.folder / "ranks.parquet")) == 8  # a folder while the run is on
    record.finish("ok")
    assert (record.folder / "ranks.parquet").is_file()
    rows = pq.read_table(record.folder / "ranks.parquet").to_pylist()
    assert [(row["epoch"], row["rank"], row["warmup"]) for row in rows] == [
        (epoch, rank, epoch == 0) for epoch in range(2) for rank in range(4)
    ]
    assert rows[7] == {
        "rank": 3, "host": "node1", "dp": 0, "tp": 1, "pp": 1, "epoch": 1, "warmup": False, "samples": None,
        "epoch_time_s": 2.003, "measured_time_s": 1.0, "straggler_wait_s": 0.5,
        "data_wait_s": 0.5, "host_wait_s": 1.5,  # of both steps
        "thread_time_s": 7.5, "sent_bytes": 640, **MEMORY, "energy_j": 60.0,
        "device_clock_before_mhz": 1980, "device_clock_after_mhz": 1410, "throttle_reasons": "board limit, power cap",
    }  # fmt: skip
    assert rows[6]["samples"] == 16


RANKS, STEPS = 1024, 1000
NUMBERS = RANKS * STEPS * 8 * 5  # bytes of steps, waits, host waits, losses and rates


def gathered() -> list[bytes]:
    """What gather_object hands to rank 0: each rank's epoch, pickled."""
    (one,) = epoch_row(0, 1, [0.5] * STEPS, losses=[1.0] * STEPS).ranks
    one = replace(one, rates=[0.1] * STEPS, memory=dict.fromkeys(PEAKS)).packed()
    return [pickle.dumps(replace(one, rank=rank)) for rank in range(RANKS)]


def row_of(messages: list[bytes], epoch: int) -> EpochRow:
    ranks: list[RankEpoch] = [pickle.loads(message) for message in messages]
    return epoch_row(epoch, 3, [0.5] * STEPS).with_ranks(ranks)


def test_an_epoch_of_a_thousand_ranks_is_recorded_in_five_seconds_and_flat_memory(tmp_path: Path) -> None:
    messages = gathered()
    assert sum(map(len, messages)) < 1.05 * NUMBERS
    record = Record.open(str(tmp_path), "run", {})
    began = time.process_time()  # the load of the machine does not count
    record.epoch(row_of(messages, 0))
    record.save()
    assert time.process_time() - began < 5
    tracemalloc.start()
    peaks: list[int] = []
    for epoch in (1, 2):
        tracemalloc.reset_peak()
        record.epoch(row_of(messages, epoch))
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[1] < 1.2 * NUMBERS  # the numbers as they came, and never the tables of all ranks
    assert peaks[1] < 1.1 * peaks[0] + 2**20  # no epoch stays in memory
    assert record.finish("ok")
    file = pq.ParquetFile(record.folder / "steps.parquet")
    assert file.metadata.num_rows == 3 * RANKS * STEPS
    ranks = np.unique(file.read_row_group(0)["rank"].to_numpy())
    assert len(ranks) == 64  # a part of the ranks at a time
    assert len((record.folder / "epochs.jsonl").read_text().splitlines()) == 3
    assert json.loads((record.folder / "run.json").read_text())["status"] == "ok"


def test_a_line_of_an_epoch_does_not_grow_with_the_ranks() -> None:
    row = epoch_row(0, 1, [0.5, 0.5])
    assert len(json.dumps(row.with_ranks(row.ranks * 1024).line())) < 2000
