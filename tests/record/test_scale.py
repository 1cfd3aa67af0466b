"""What rank 0 does at the end of an epoch of 1,024 ranks: from the bytes that were gathered to the files."""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ddlbench.measure.devices.memory import PEAKS
from ddlbench.measure.rows import EpochRow, RankEpoch
from ddlbench.record.record import Record
from tests.support.epoch_rows import epoch_row

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
    assert peaks[1] < 3 * NUMBERS
    assert peaks[1] < 1.1 * peaks[0] + 2**20  # no epoch stays in memory
    assert record.finish("ok")
    file = pq.ParquetFile(record.folder / "steps.parquet")
    assert file.metadata.num_rows == 3 * RANKS * STEPS
    ranks = np.unique(file.read_row_group(0)["rank"].to_numpy())
    assert len(ranks) == 64  # a part of the ranks at a time
    assert len((record.folder / "epochs.jsonl").read_text().splitlines()) == 3
    assert json.loads((record.folder / "run.json").read_text())["status"] == "ok"


@pytest.mark.parametrize("ranks", [1, 1024])
def test_a_line_of_an_epoch_does_not_grow_with_the_ranks(ranks: int) -> None:
    one = epoch_row(0, 1, [0.5, 0.5])
    many = one.with_ranks(one.ranks * ranks)
    assert len(json.dumps(many.line())) < 2000
