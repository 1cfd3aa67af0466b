"""The rows of steps.parquet: every step of every rank; of an epoch that was interrupted, the steps of rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from ddlbench.measure.rows import EpochRow, RankEpoch
from ddlbench.record.epoch_files import schema_of
from ddlbench.record.schema import STEPS

SCHEMA = schema_of(STEPS)


def step_tables(row: EpochRow) -> Iterator[Any]:
    """One table a rank."""
    return (_table(row.epoch, rank, row.warmup) for rank in row.ranks)


def interrupted_steps(epoch: int, rank: RankEpoch) -> Any:
    """Those of an epoch that did not end: no other table has them, and none counts them."""
    return _table(epoch, rank, warmup=True, complete=False)


def _table(epoch: int, rank: RankEpoch, warmup: bool, complete: bool = True) -> Any:
    steps, times = len(rank.times.step_s), rank.times
    number = np.arange(steps)
    losses = np.asarray(rank.losses)
    columns: dict[str, Any] = {
        "rank": np.full(steps, rank.rank),
        "data_rank": np.full(steps, rank.data_rank),
        "epoch": np.full(steps, epoch),
        "step": number,
        "step_time_s": np.asarray(times.step_s),
        "data_wait_s": np.asarray(times.wait_s),
        "host_wait_s": np.asarray(times.host_wait_s) if len(times.host_wait_s) else pa.nulls(steps),
        "lr": np.asarray(rank.rates) if len(rank.rates) else pa.nulls(steps),
        "loss": pa.array(losses, pa.float64(), mask=~np.isfinite(losses)) if len(losses) else pa.nulls(steps),
        "warmup": warmup | (number < times.warmup_steps),
        "complete": np.full(steps, complete),
    }
    return pa.table(columns, schema=SCHEMA)
