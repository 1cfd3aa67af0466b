"""Values of JSON as cells: what does not fit is left out, with a note. Lines of epochs.jsonl become rows, each epoch
once and in order, and those of several attempts one table."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from ddlbench.record.schema import EPOCHS, RUNS
from ddlbench.results.reading.attempts import lines_of
from ddlbench.results.reading.cells import LONGEST_NAME, cell, epochs_of, epochs_table, fit
from ddlbench.results.tables.tables import records
from tests.support import hostile

COLUMNS = {column.name: column for column in (*EPOCHS, *RUNS)}
CELLS = (
    (3, "int", 3), (3.0, "int", 3), (3.5, "int", None), (True, "int", None), ("3", "int", None), ([], "int", None),
    (["a.jpg", "b.jpg"], "int", None), (2**63 - 1, "int", 2**63 - 1), (2**63, "int", None), (1e300, "int", None),
    (2, "float", 2.0), (0, "float", 0.0), (10**400, "float", None), ("2.5", "float", None), ("NaN", "float", None),
    (True, "float", None), (float("nan"), "float", None), (float("inf"), "float", None),
    ("node1", "text", "node1"), (["node1", "node2"], "text", "node1 node2"), ({}, "text", None),
    ({"b": 1, "a": 2}, "text", '{"a": 2, "b": 1}'), (False, "bool", False), (0, "bool", None),
)  # fmt: skip


@pytest.mark.parametrize(("value", "kind", "expected"), CELLS)
def test_a_value_is_a_cell_of_its_kind_or_an_empty_one(value, kind, expected):
    assert cell(value, kind) == expected
    assert type(cell(value, kind)) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "note"),
    [
        ("epoch_time_s", -1.0, "epoch_time_s = -1.0 (must lie in 1e-06 to 1e+09)"),
        ("epoch_time_s", float("nan"), "epoch_time_s = NaN (not a finite number)"),
        ("epoch_time_s", "3", 'epoch_time_s = "3" (not a finite number)'),
        ("val_top1", 1.5, "val_top1 = 1.5 (must lie in 0 to 1)"),
        ("mfu", -0.1, "mfu = -0.1 (must lie in 0 to 1)"),
        ("val_perplexity_token", 0.5, "val_perplexity_token = 0.5 (must lie in 1 to 1e+30)"),
        ("gpus", 0, "gpus = 0 (must lie in 1 to 1e+06)"),
        ("samples", -5, "samples = -5 (must lie in 0 to 1e+12)"),
        ("samples", 2.5, "samples = 2.5 (not a whole number of 64 bits)"),
        ("steps", 2**70, "steps = 1180591620717411303424 (not a whole number of 64 bits)"),
        ("warmup", "yes", 'warmup = "yes" (not true or false)'),
    ],
)
def test_what_does_not_fit_is_left_out_and_noted(name, value, note):
    left_out = []
    assert fit(value, COLUMNS[name], left_out) is None
    assert left_out == [note]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("epoch_time_s", unknown, None) for unknown in (None, [], {})),
        *(("cpu_share", 3.5, 3.5), ("mfu", 1.0, 1.0), ("val_loss", 0.0, 0.0), ("epoch", 0, 0)),
    ],
)
def test_what_is_not_known_and_the_ends_of_a_range_need_no_note(name, value, expected):
    left_out = []
    assert (fit(value, COLUMNS[name], left_out), left_out) == (expected, [])


def test_long_names_are_cut_and_stay_different():
    one, other = (fit("x" * 100_000 + end, COLUMNS["framework"], []) for end in "ab")
    assert len(one) == len(other) == LONGEST_NAME
    assert one != other
    hosts = " ".join(f"node{number}" for number in range(500))
    assert fit(hosts, COLUMNS["hosts"], []) == hosts


LINES = [{"epoch": n, "epoch_time_s": 2.0 + n, "steps": 5, "warmup": n == 0, "val_top1": 0.5} for n in range(3)]
THROTTLED = [line | {"throttle_reasons": text} for line, text in zip(LINES, ("heat", None, "power, heat"), strict=True)]


def text_of(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def read(content: bytes) -> tuple[list[dict[str, Any]], int, list[str]]:
    """The cells that have a value, broken lines, notes."""
    lines, broken = lines_of(content)
    rows = epochs_of(lines, notes := []).to_pylist()
    return [{key: cell for key, cell in row.items() if cell is not None} for row in rows], broken, notes


def test_lines_of_the_harness() -> None:
    expected = [{key: cell for key, cell in line.items() if cell is not None} for line in THROTTLED]
    assert read(text_of(THROTTLED)) == (expected, 0, [])
    assert read(text_of(THROTTLED).removesuffix(b"\n")) == (expected, 0, [])


@pytest.mark.parametrize("field", ["epoch_time_s", "elapsed_s", "val_top1", "steps", "warmup", "unknown"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_odd_value_changes_no_other_cell(field: str, place: int) -> None:
    for value in hostile.VALUES:
        lines = [line | ({field: value} if n == place else {}) for n, line in enumerate(LINES)]
        rows, broken, notes = read(text_of(lines))
        assert broken == 0
        assert [{**row, field: None} for row in rows] == [{**line, field: None} for line in LINES], value
        assert len(notes) <= 1


FIRST, SECOND = text_of(LINES[:1]), text_of(LINES[1:2])
# The lines, the epochs that they have, and how many lines are left out.
ODD: dict[str, tuple[bytes, list[int], int]] = {
    "nothing": (b"", [], 0),
    "empty lines": (FIRST + b"\n \n" + SECOND, [0, 1], 0),
    "half a line": (FIRST + SECOND[:20], [0], 1),
    "half a line between": (FIRST + SECOND[:20] + b"\n" + SECOND, [0, 1], 1),
    "two objects in a line": (FIRST.strip() + SECOND, [], 1),
    "an object of two lines": (FIRST + b'{"epoch": 1,\n"steps": 5}\n', [0], 2),
    "a list of objects": (b"[" + FIRST.strip() + b"]\n", [], 1),
    "a list": (FIRST + b"[1]\n", [0], 1),
    "a number": (FIRST + b"1\n", [0], 1),
    "carriage returns": (FIRST.replace(b"\n", b"\r\n") + SECOND, [0, 1], 0),
    "a key twice": (b'{"epoch": 0, "epoch": 1}\n', [1], 0),
    "a key with an escape": (b'{"\\u0065poch": 7}\n', [7], 0),
    "a number that is no JSON": (b'{"epoch": 01}\n', [], 1),
    "a comma too many": (b'{"epoch": 1,}\n', [], 1),
    "a new line in a text": (b'{"epoch": 0, "throttle_reasons": "}\n{"}\n', [], 2),
    "a zero byte": (b'{"epoch": 0}\0\n', [], 1),
    "bytes that are no text": (b'{"epoch": 0, "x": "\xff"}\n', [], 1),
    "a byte order mark": (b"\xef\xbb\xbf" + FIRST, [], 1),
    "a deep value": (b'{"epoch": 0, "x": ' + b'{"a":' * 60 + b"1" + b"}" * 61 + b"\n", [], 1),
    "no number": (b'{"epoch": 0, "x": Inf}\n{"epoch": 1, "x": NaN}\n{"epoch": 2, "val_loss": -Inf}\n', [1], 2),
    "out of order": (SECOND + FIRST, [0, 1], 0),
}


@pytest.mark.parametrize(("content", "epochs", "broken"), ODD.values(), ids=ODD)
def test_an_odd_line_is_left_out_and_the_others_are_read(content: bytes, epochs: list[int], broken: int) -> None:
    rows, left, notes = read(content)
    assert ([row["epoch"] for row in rows], left, notes) == (epochs, broken, [])


@pytest.mark.parametrize(
    ("text", "column", "cell"),
    [
        ('"val_loss": -0', "val_loss", 0.0),
        ('"val_loss": 3', "val_loss", 3.0),
        ('"val_loss": 1E2', "val_loss", 100.0),
        ('"val_loss": 1e-400', "val_loss", 0.0),
        ('"steps": 5.0', "steps", 5),
        ('"throttle_reasons": "}{"', "throttle_reasons", "}{"),
        ('"throttle_reasons": 5', "throttle_reasons", "5"),
        ('"throttle_reasons": "a\x7fb"', "throttle_reasons", "a\\x7fb"),
    ],
)
def test_unusual_texts_of_values_are_read(text: str, column: str, cell: object) -> None:
    assert read(f'{{"epoch": 0, {text}}}'.encode()) == ([{"epoch": 0, column: cell}], 0, [])


def test_values_out_of_range_are_noted_as_the_record_has_them() -> None:
    content = b'{"epoch": 0, "val_top1": 7}\n{"epoch": 1, "val_top1": 0.5}\n{"epoch": 2, "val_top1": 7.0}\n'
    rows, _, notes = read(content)
    assert rows == [{"epoch": 0}, {"epoch": 1, "val_top1": 0.5}, {"epoch": 2}]
    assert notes == ["val_top1 = 7 (must lie in 0 to 1)", "val_top1 = 7.0 (must lie in 0 to 1)"]


def test_floats_keep_all_their_digits() -> None:
    drawn = random.Random(1)
    lines = [
        {"epoch": n, "val_loss": drawn.random() * 10.0 ** drawn.randint(-12, 8), "lr_last": drawn.random() / 3}
        for n in range(1_000)
    ]
    assert read(text_of(lines))[0] == lines


def test_an_epoch_counts_once() -> None:
    first, again = ({"epoch": 0, "epoch_time_s": seconds} for seconds in (1.0, 9.0))
    notes = ["1 line(s) of epochs.jsonl that repeat an epoch"]
    assert read(text_of([first, again, {"epoch": 1}])) == ([first, {"epoch": 1}], 0, notes)


def test_lines_without_a_number_are_left_out() -> None:
    lines = [{"epoch": None}, {}, {"epoch": True}, {"epoch": "1"}, {"epoch": -1}, {"epoch": 3}]
    notes = [
        "epoch = true (not a whole number of 64 bits)",
        'epoch = "1" (not a whole number of 64 bits)',
        "epoch = -1 (must lie in 0 to 1e+09)",
        "5 line(s) of epochs.jsonl without the number of their epoch",
    ]
    assert read(text_of(lines)) == ([{"epoch": 3}], 0, notes)


RUN = {column.name: None for column in EPOCHS} | {"framework": "ddp", "gpus": 2, "path": "a"}


def test_columns_and_texts_of_several_attempts():
    other = RUN | {"framework": None, "gpus": 4, "path": "b"}
    table = epochs_table([RUN, other, other], [epochs_of(lines, []) for lines in (THROTTLED, [], LINES[:1])])
    rows = records(table)
    assert list(table) == list(epochs_table([], [])) == [column.name for column in EPOCHS]
    names = ("framework", "gpus", "epoch", "epoch_time_s", "warmup", "throttle_reasons", "val_loss")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("ddp", 2, 0, 2.0, True, "heat", None),
        ("ddp", 2, 1, 3.0, False, None, None),
        ("ddp", 2, 2, 4.0, False, "power, heat", None),
        (None, 4, 0, 2.0, True, None, None),
    ]


def test_many_epochs_take_little_memory():
    """One Python object a row would take several times as much; 10,000 runs of 100 epochs are fifty times as many."""
    tracemalloc.start()
    try:
        epochs = [epochs_of([LINES[0] | {"epoch": n} for n in range(100)], []) for _ in range(200)]
        table = epochs_table([RUN] * 200, epochs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 20_000
    assert peak < 20e6
