"""steps.parquet: every step of every rank. A folder with a file an epoch: it can be read at any time, also where the
run was killed, and as one table (pandas.read_parquet of the folder)."""

from __future__ import annotations

import contextlib
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
    """Grows by whole files: a file stands under its own name only when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: EpochRow) -> None:
        """Raises OSError, and then leaves nothing of this epoch."""
        self.path.mkdir(exist_ok=True)
        growing = self.path / f".epoch-{row.epoch:06}"  # readers pass over hidden files
        try:
            pq.write_table(pa.concat_tables([_table(row, rank) for rank in row.ranks]), growing)
            growing.replace(self.path / f"epoch-{row.epoch:06}.parquet")
        except BaseException:
            with contextlib.suppress(OSError):
                growing.unlink()
            raise


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
