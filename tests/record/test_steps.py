"""The rows of steps.parquet, of two ranks whose figures differ in every column."""

from __future__ import annotations

import math
from dataclasses import replace

import pyarrow as pa

from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.rows import RankEpoch
from ddlbench.record.record import step_table
from tests.support.epoch_rows import MEMORY, epoch_row

REPORTING = RankEpoch(
    2, 1, EpochTimes(6.0, 3.0, 0.5, 1, [3.0, 1.0, 2.0], [0.75, 0.25, 0.5], [0.625, 0.125, 0.0]),
    [4.0, math.nan, 2.0], [0.5, 0.25, 0.125], MEMORY,
)  # fmt: skip
SILENT = replace(REPORTING, rank=3, losses=[])
TIMES = {
    "step": [0, 1, 2],
    "step_time_s": [3.0, 1.0, 2.0],
    "data_wait_s": [0.75, 0.25, 0.5],
    "host_wait_s": [0.625, 0.125, 0.0],
    "data_rank": [1, 1, 1],
}


def test_every_step_of_every_rank_is_a_row() -> None:
    row = replace(epoch_row(1, 2, [1.0]), ranks=[REPORTING, SILENT])
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


def test_every_step_of_a_warmup_epoch_is_one_of_the_warmup() -> None:
    row = epoch_row(0, 2, [1.0])
    table = step_table(row.epoch, REPORTING, row.warmup)
    assert table["warmup"].to_pylist() == [True] * 3


def test_steps_of_an_epoch_that_was_interrupted_count_nowhere() -> None:
    result = step_table(3, replace(REPORTING, losses=[], rates=[]), warmup=True, complete=False).to_pydict()
    assert {name: result[name] for name in TIMES} == TIMES
    assert (result["warmup"], result["complete"], result["epoch"]) == ([True] * 3, [False] * 3, [3] * 3)
    assert result["loss"] == result["lr"] == [None] * 3
