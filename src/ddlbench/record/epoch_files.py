"""A table that grows by one file an epoch: steps.parquet and ranks.parquet.

During the run it is a folder with one file for each epoch, which pandas.read_parquet reads as one table: so a run that
is killed leaves its epochs. The end of the run makes one file of them. The memory that this takes does not grow with
the number of ranks or epochs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ddlbench.files import replacing
from ddlbench.measure.devices.meter import Use
from ddlbench.measure.rows import EpochRow, RankEpoch
from ddlbench.record.schema import RANK_EPOCHS, STEPS, schema_of

TABLES_IN_A_GROUP = 64  # of ranks in a row group: one each would make the file's index larger than its rows


STEP_SCHEMA, RANK_SCHEMA = schema_of(STEPS), schema_of(RANK_EPOCHS)


@dataclass
class EpochFiles:
    """A file has its name only when it is complete."""

    path: Path
    schema: Any

    def append(self, epoch: int, tables: Iterable[Any]) -> None:
        """Tables with the schema, in their order. Raises OSError, and then leaves nothing of this epoch."""
        self.path.mkdir(exist_ok=True)
        path, rest = self.path / f"epoch-{epoch:06}.parquet", iter(tables)
        # Readers pass over the temporary file, because it is hidden.
        with replacing(path, through=self.path) as file, pq.ParquetWriter(file, self.schema) as writer:
            while group := list(islice(rest, TABLES_IN_A_GROUP)):
                writer.write_table(pa.concat_tables(group))

    def close(self) -> None:
        """Put one file in the place of the folder. Raises OSError, also for a damaged file of an epoch, and then the
        epochs can be read as before."""
        if not self.path.is_dir():
            return
        complete, epochs = self.path.with_name(f".{self.path.name}"), self.path.with_name(f".{self.path.name}-epochs")
        with replacing(complete, through=complete.parent) as file, pq.ParquetWriter(file, self.schema) as writer:
            for epoch in sorted(self.path.glob("epoch-*.parquet")):
                try:
                    with pq.ParquetFile(epoch) as rows:
                        for group in range(rows.num_row_groups):
                            writer.write_table(rows.read_row_group(group))
                except (pa.ArrowException, ValueError) as error:
                    raise OSError(f"{epoch} is damaged: {error}") from error
        self.path.rename(epochs)
        complete.rename(self.path)
        shutil.rmtree(epochs, ignore_errors=True)


def step_table(epoch: int, rank: RankEpoch, warmup: bool, complete: bool = True) -> Any:
    """The steps of one rank. complete: whether the epoch ended"""
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
    return pa.table(columns, schema=STEP_SCHEMA)


def rank_row(row: EpochRow, rank: RankEpoch) -> dict[str, Any]:
    """A row of ranks.parquet: where a rank is and what it used."""
    times, place = rank.times, rank.coordinates
    use = times.use or Use(seconds=0.0, counts_energy=False)
    return {
        "rank": rank.rank,
        "host": rank.host,
        "dp": rank.data_rank,
        "tp": place.get("tp", place.get("sp", 0)),
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
        "sent_bytes": use.sent_bytes,
        **rank.memory,
        "energy_j": use.energy_j,
        "device_clock_before_mhz": use.clock_before_mhz,
        "device_clock_after_mhz": use.clock_after_mhz,
        "throttle_reasons": ", ".join(use.throttled or ()) or None,
    }
