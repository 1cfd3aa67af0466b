"""steps.parquet: every step of every rank, a row group an epoch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ddlbench.measure.rows import EpochRow, RankEpoch

SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("data_rank", pa.int32()),
        ("epoch", pa.int32()),
        ("step", pa.int32()),
        ("step_time_s", pa.float64()),
        ("data_wait_s", pa.float64()),
        ("lr", pa.float64()),
        ("loss", pa.float32()),
        ("warmup", pa.bool_()),
    ]
)


class StepTable:
    """Grows in a hidden file; stands under its own name only when closed, whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.growing = path.with_name(f".{path.name}")
        self.writer: Any = None

    def append(self, row: EpochRow) -> None:
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.growing, SCHEMA)
        self.writer.write_table(pa.concat_tables([_table(row, rank) for rank in row.ranks]))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.growing.replace(self.path)
            self.writer = None


def _table(row: EpochRow, rank: RankEpoch) -> Any:
    steps = range(len(rank.times.step_s))
    warm = rank.times.warmup_steps
    columns: dict[str, Any] = {
        "rank": [rank.rank] * len(steps),
        "data_rank": [rank.data_rank] * len(steps),
        "epoch": [row.epoch] * len(steps),
        "step": list(steps),
        "step_time_s": rank.times.step_s,
        "data_wait_s": rank.times.wait_s,
        "lr": rank.rates or [None] * len(steps),
        "loss": [loss if math.isfinite(loss) else None for loss in rank.losses] or [None] * len(steps),
        "warmup": [row.warmup or step < warm for step in steps],
    }
    return pa.table(columns, schema=SCHEMA)
