"""Cells that are made column by column equal cells that are made row by row."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from ddlbench.record.schema import EPOCHS
from ddlbench.report.blocks import block, epochs_table
from ddlbench.report.epochs import epoch_rows
from ddlbench.report.tables import records
from tests.support import hostile

RUN = {column.name: None for column in EPOCHS} | {"framework": "ddp", "gpus": 2, "path": "a"}
LINES = [{"epoch": n, "epoch_time_s": 2.0 + n, "steps": 5, "warmup": n == 0, "val_top1": 0.5} for n in range(3)]


def table_of(lines, left_out):
    return records(epochs_table([block(RUN, lines, left_out)]))


def test_columns_and_texts_of_several_attempts():
    other = RUN | {"framework": None, "gpus": 4, "path": "b"}
    table = epochs_table([block(RUN, LINES, []), block(other, [], []), block(other, LINES[:1], [])])
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
    rows = table_of(lines, left_out := [])
    assert [row["throttle_reasons"] for row in rows] == ["heat", None, "power cap"]
    assert not left_out


def test_no_attempt_is_an_empty_table():
    assert len(epochs_table([])) == 0


ODD = [(field, value) for field in hostile.EPOCH_FIELDS for value in hostile.VALUES]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_odd_values_give_the_same_cells_and_notes_as_row_by_row(place):
    for field, value in ODD:
        lines = [dict(line) for line in LINES]
        lines[place][field] = value
        notes, expected_notes = [], []
        expected = epoch_rows(lines, expected_notes)
        found = table_of(lines, notes)
        own = [{name: row[name] for name in expected[0]} for row in found]
        assert own == expected, (field, value)
        assert sorted(notes) == sorted(expected_notes), (field, json.dumps(value)[:50])


def test_lines_with_other_keys_and_in_another_order_are_rows_too():
    lines = [{"epoch": 1, "val_loss": 2.0}, {"epoch": 0}, {"epoch": 1, "val_loss": 9.0}]
    notes = []
    assert [(row["epoch"], row["val_loss"]) for row in table_of(lines, notes)] == [(0, None), (1, 2.0)]
    assert notes == ["1 line(s) of epochs.jsonl that repeat an epoch"]


def test_many_epochs_take_little_memory():
    """100,000 epochs as one Python object a row would take some hundred MiB; 10,000 runs of 100 epochs have ten times
    as many."""
    tracemalloc.start()
    try:
        blocks = [block(RUN, [line | {"epoch": 3 * n + line["epoch"]} for n in range(100) for line in LINES], [])]
        blocks += [block(RUN, [LINES[0] | {"epoch": n} for n in range(100)], []) for _ in range(997)]
        table = epochs_table(blocks)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 300 + 99_700
    assert peak < 100e6
