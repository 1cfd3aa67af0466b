"""Lines of epochs.jsonl become rows, each epoch once and in order; what is not a line of a run is counted."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ddlbench.results.reading.attempts import lines_of
from ddlbench.results.reading.cells import epochs_of
from tests.support import hostile

LINES = [{"epoch": n, "epoch_time_s": 2.0 + n, "steps": 5, "warmup": n == 0, "val_top1": 0.5} for n in range(3)]


def text_of(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def read(content: bytes) -> tuple[list[dict[str, Any]], int, list[str]]:
    """The cells that have a value, broken lines, notes."""
    lines, broken = lines_of(content)
    rows = epochs_of(lines, notes := []).to_pylist()
    return [{key: cell for key, cell in row.items() if cell is not None} for row in rows], broken, notes


def test_lines_of_the_harness() -> None:
    texts = [line | {"throttle_reasons": text} for line, text in zip(LINES, ("heat", None, "power, heat"), strict=True)]
    expected = [{key: cell for key, cell in line.items() if cell is not None} for line in texts]
    assert read(text_of(texts)) == (expected, 0, [])
    assert read(text_of(texts).removesuffix(b"\n")) == (expected, 0, [])


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
def test_odd_lines(content: bytes, epochs: list[int], broken: int) -> None:
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
def test_unusual_cells(text: str, column: str, cell: object) -> None:
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


def rows_of(*lines: dict[str, Any]) -> tuple[list[tuple[int, float | None]], list[str]]:
    rows = epochs_of(lines, left_out := []).to_pylist()
    return [(row["epoch"], row["epoch_time_s"]) for row in rows], left_out


def test_an_epoch_counts_once() -> None:
    rows, left_out = rows_of({"epoch": 0, "epoch_time_s": 1.0}, {"epoch": 0, "epoch_time_s": 9.0}, {"epoch": 1})
    assert rows == [(0, 1.0), (1, None)]
    assert left_out == ["1 line(s) of epochs.jsonl that repeat an epoch"]


def test_lines_without_a_number_are_left_out() -> None:
    rows, left_out = rows_of({"epoch": None}, {}, {"epoch": True}, {"epoch": "1"}, {"epoch": -1}, {"epoch": 3})
    assert rows == [(3, None)]
    assert left_out[-1] == "5 line(s) of epochs.jsonl without the number of their epoch"
    assert left_out[:-1] == [
        "epoch = true (not a whole number of 64 bits)",
        'epoch = "1" (not a whole number of 64 bits)',
        "epoch = -1 (must lie in 0 to 1e+09)",
    ]
