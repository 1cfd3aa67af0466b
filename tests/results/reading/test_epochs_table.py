"""The epochs of several attempts as one table."""

from __future__ import annotations

import tracemalloc

from ddlbench.record.schema import EPOCHS
from ddlbench.results.reading.cells import epochs_of, epochs_table
from ddlbench.results.tables.tables import records

RUN = {column.name: None for column in EPOCHS} | {"framework": "ddp", "gpus": 2, "path": "a"}
LINES = [{"epoch": n, "epoch_time_s": 2.0 + n, "steps": 5, "warmup": n == 0, "val_top1": 0.5} for n in range(3)]


def own(lines):
    return epochs_of(lines, [])


def test_columns_and_texts_of_several_attempts():
    other = RUN | {"framework": None, "gpus": 4, "path": "b"}
    table = epochs_table([RUN, other, other], [own(LINES), own([]), own(LINES[:1])])
    rows = records(table)
    assert list(table) == [column.name for column in EPOCHS]
    assert [(row["framework"], row["gpus"], row["epoch"]) for row in rows] == [
        ("ddp", 2, 0),
        ("ddp", 2, 1),
        ("ddp", 2, 2),
        (None, 4, 0),
    ]
    assert [row["epoch_time_s"] for row in rows] == [2.0, 3.0, 4.0, 2.0]
    assert [row["warmup"] for row in rows] == [True, False, False, True]
    assert {row["val_loss"] for row in rows} == {None}


def test_texts_of_single_epochs():
    lines = [line | {"throttle_reasons": text} for line, text in zip(LINES, ("heat", None, "power cap"), strict=True)]
    rows = records(epochs_table([RUN], [own(lines)]))
    assert [row["throttle_reasons"] for row in rows] == ["heat", None, "power cap"]


def test_no_attempt_is_an_empty_table():
    assert len(epochs_table([], [])) == 0


def test_many_epochs_take_little_memory():
    """One Python object a row would take several times as much; 10,000 runs of 100 epochs are fifty times as many."""
    tracemalloc.start()
    try:
        epochs = [own([LINES[0] | {"epoch": n} for n in range(100)]) for _ in range(200)]
        table = epochs_table([RUN] * 200, epochs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 20_000
    assert peak < 20e6
