"""steps.parquet: every step of every rank, a row group for each epoch.

While the run is on it is a folder with one file for each epoch, which pandas.read_parquet reads as one table: so a run
that is killed leaves its epochs. The end of the run makes one file of them.
"""

from __future__ import annotations

import contextlib
import math
import shutil
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
    """A file has its name only when it is complete."""

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

    def close(self) -> None:
        """Put one file in the place of the folder. Raises OSError, and then the epochs can be read as before."""
        if not self.path.is_dir():
            return
        whole, epochs = self.path.with_name(f".{self.path.name}"), self.path.with_name(f".{self.path.name}-epochs")
        try:
            with pq.ParquetWriter(whole, SCHEMA) as writer:
                for epoch in sorted(self.path.glob("epoch-*.parquet")):
                    writer.write_table(pq.read_table(epoch, schema=SCHEMA))
        except BaseException:
            with contextlib.suppress(OSError):
                whole.unlink()
            raise
        self.path.rename(epochs)
        whole.rename(self.path)
        shutil.rmtree(epochs, ignore_errors=True)


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
