"""Lines of epochs.jsonl become rows, each epoch once and in order."""

from __future__ import annotations

from ddlbench.results.reading.epoch_rows import epoch_rows


def rows_of(*lines):
    left_out = []
    rows = epoch_rows(lines, left_out)
    return [(row["epoch"], row["epoch_time_s"]) for row in rows], left_out


def test_lines_are_rows():
    assert rows_of({"epoch": 0, "epoch_time_s": 2.0}, {"epoch": 1}) == ([(0, 2.0), (1, None)], [])


def test_lines_out_of_order_are_put_in_order():
    assert rows_of({"epoch": 2}, {"epoch": 0}, {"epoch": 1})[0] == [(0, None), (1, None), (2, None)]


def test_an_epoch_counts_once():
    rows, left_out = rows_of({"epoch": 0, "epoch_time_s": 1.0}, {"epoch": 0, "epoch_time_s": 9.0}, {"epoch": 1})
    assert rows == [(0, 1.0), (1, None)]
    assert left_out == ["1 line(s) of epochs.jsonl that repeat an epoch"]


def test_lines_without_a_number_are_left_out():
    rows, left_out = rows_of({"epoch": None}, {}, {"epoch": True}, {"epoch": "1"}, {"epoch": -1}, {"epoch": 3})
    assert rows == [(3, None)]
    assert left_out[-1] == "5 line(s) of epochs.jsonl without the number of their epoch"
    assert left_out[:-1] == [
        "epoch = true (not a whole number of 64 bits)",
        'epoch = "1" (not a whole number of 64 bits)',
        "epoch = -1 (must lie in 0 to 1e+09)",
    ]
