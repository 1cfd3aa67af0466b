"""The rows of ranks.parquet: every rank and epoch, with where the rank is and what it used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ddlbench.measure.devices.meter import Use
from ddlbench.measure.rows import EpochRow, RankEpoch
from ddlbench.record.epoch_files import schema_of
from ddlbench.record.schema import RANK_EPOCHS

SCHEMA = schema_of(RANK_EPOCHS)


def rank_tables(row: EpochRow) -> Iterator[Any]:
    """One table for all ranks."""
    yield pa.Table.from_pylist([_row(row, rank) for rank in row.ranks], schema=SCHEMA)


def _row(row: EpochRow, rank: RankEpoch) -> dict[str, Any]:
    times, place = rank.times, rank.coordinates
    use = times.use or Use(seconds=0.0, counts_energy=False)
    return {
        "rank": rank.rank,
        "host": rank.host,
        "dp": rank.data_rank,
        "tp": place.get("tp", 0),
        "pp": rank.stage,
        "epoch": row.epoch,
        "warmup": row.warmup,
        "samples": rank.samples,
        "epoch_time_s": times.epoch_s,
        "measured_time_s": times.measured_s,
        "straggler_wait_s": times.straggler_s,
        "data_wait_s": sum(times.wait_s),
        "host_wait_s": sum(times.host_wait_s),
        "thread_time_s": use.thread_s,
        **rank.memory,
        "energy_j": use.energy_j,
        "device_clock_before_mhz": use.clock_before_mhz,
        "device_clock_after_mhz": use.clock_after_mhz,
        "throttle_reasons": ", ".join(use.throttled or ()) or None,
    }
