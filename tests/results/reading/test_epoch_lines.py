"""Lines of epochs.jsonl that pyarrow reads at once give the cells and notes of those that are read one by one."""

from __future__ import annotations

import json
import random

import pytest

from ddlbench.results.reading.epoch_lines import lines_of, table_of, tables_of
from ddlbench.results.reading.epoch_rows import epoch_rows
from tests.support import hostile

LINES = [{"epoch": n, "epoch_time_s": 2.0 + n, "steps": 5, "warmup": n == 0, "val_top1": 0.5} for n in range(3)]


def text_of(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def one_by_one(content):
    """Rows, notes and broken lines, by Python's own parser."""
    lines, broken = lines_of(content)
    return epoch_rows(lines, notes := []), notes, broken


def check(content):
    """The rows, which are those of either way."""
    table, broken = table_of(content, notes := [])
    rows = table.to_pylist()
    expected, expected_notes, expected_broken = one_by_one(content)
    assert [{key: repr(value) for key, value in row.items()} for row in rows] == [
        {key: repr(value) for key, value in row.items()} for row in expected
    ], content[:500]
    assert (sorted(notes), broken) == (sorted(expected_notes), expected_broken), content[:500]
    return rows


def is_read_at_once(content, monkeypatch):
    """Whether Python's parser is not asked."""
    with monkeypatch.context() as patch:
        patch.setattr("ddlbench.results.reading.epoch_lines.lines_of", lambda _: 1 / 0)
        try:
            table_of(content, [])
        except ZeroDivisionError:
            return False
        return True


def test_lines_of_the_harness_are_read_at_once(monkeypatch):
    content = text_of(LINES)
    assert is_read_at_once(content, monkeypatch)
    assert [(row["epoch"], row["epoch_time_s"], row["warmup"], row["val_loss"]) for row in check(content)] == [
        (0, 2.0, True, None),
        (1, 3.0, False, None),
        (2, 4.0, False, None),
    ]
    assert is_read_at_once(content.removesuffix(b"\n"), monkeypatch)
    texts = [line | {"throttle_reasons": text} for line, text in zip(LINES, ("heat", None, "power, heat"), strict=True)]
    assert is_read_at_once(text_of(texts), monkeypatch)
    assert [row["throttle_reasons"] for row in check(text_of(texts))] == ["heat", None, "power, heat"]


@pytest.mark.parametrize("field", [*hostile.EPOCH_FIELDS, "steps", "warmup", "throttle_reasons", "unknown"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_odd_values(field, place):
    for value in hostile.VALUES:
        lines = [dict(line) for line in LINES]
        lines[place][field] = value
        check(text_of(lines))


FIRST, SECOND = text_of(LINES[:1]), text_of(LINES[1:2])
ODD = {
    "nothing": b"",
    "empty lines": FIRST + b"\n \n" + SECOND,
    "half a line": FIRST + SECOND[:20],
    "half a line between": FIRST + SECOND[:20] + b"\n" + SECOND,
    "two objects in a line": FIRST.strip() + SECOND,
    "an object of two lines": FIRST + b'{"epoch": 1,\n"steps": 5}\n',
    "both": b'{"epoch": 0}{"epoch": 1,\n"steps": 5}\n',
    "a list of objects": b"[" + FIRST.strip() + b"]\n",
    "a list": FIRST + b"[1]\n",
    "a number": FIRST + b"1\n",
    "carriage returns": FIRST.replace(b"\n", b"\r\n") + SECOND,
    "a key twice": b'{"epoch": 0, "epoch": 1}\n',
    "an unknown key twice": b'{"epoch": 0, "x": 1, "x": 2}\n',
    "a key with an escape": b'{"\\u0065poch": 7}\n',
    "a number that is no JSON": b'{"epoch": 01}\n',
    "a number without an end": b'{"epoch": 1, "val_loss": 1.}\n',
    "a comma too many": b'{"epoch": 1,}\n',
    "braces in a text": b'{"epoch": 0, "throttle_reasons": "}{"}\n{"epoch": 1}\n',
    "a new line in a text": b'{"epoch": 0, "throttle_reasons": "}\n{"}\n',
    "a zero byte": b'{"epoch": 0}\0\n',
    "a zero byte within": b'{"epoch": 0\0}\n',
    "bytes that are no text": b'{"epoch": 0, "x": "\xff"}\n',
    "a byte order mark": b"\xef\xbb\xbf" + FIRST,
    "a deep value": b'{"epoch": 0, "x": ' + b'{"a":' * 60 + b"1" + b"}" * 61 + b"\n",
    "no number": b'{"epoch": 0, "x": Inf}\n{"epoch": 1, "x": NaN}\n{"epoch": 2, "val_loss": -Inf}\n',
    "minus zero": b'{"epoch": 0, "val_loss": -0}\n{"epoch": 1, "val_loss": 1.5}\n',
    "a whole number as a float": b'{"epoch": 0, "steps": 5.0, "val_loss": 3}\n',
    "an exponent": b'{"epoch": 0, "val_loss": 1E2, "epoch_time_s": 1e-3}\n{"epoch": 1e0}\n',
    "too small": b'{"epoch": 0, "val_loss": 1e-400}\n',
    "too large": b'{"epoch": 0, "val_loss": 1e400}\n',
    "out of order": SECOND + FIRST,
    "an epoch twice": FIRST + FIRST,
    "a text": b'{"epoch": 0, "throttle_reasons": 5}\n',
    "a date": b'{"epoch": 0, "throttle_reasons": "2026-01-01T00:00:00"}\n',
    "a long text": b'{"epoch": 0, "throttle_reasons": "%s"}\n' % (b"x" * 20_000),
    "a character that does not print": b'{"epoch": 0, "throttle_reasons": "a\x7fb"}\n',
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_odd_lines(content):
    check(content)


def test_values_out_of_range_are_noted_as_the_record_has_them():
    content = b'{"epoch": 0, "val_top1": 7}\n{"epoch": 1, "val_top1": 0.5}\n{"epoch": 2, "val_top1": 7.0}\n'
    table, _ = table_of(content, notes := [])
    assert table["val_top1"].to_pylist() == [None, 0.5, None]
    assert notes == ["val_top1 = 7 (must lie in 0 to 1)", "val_top1 = 7.0 (must lie in 0 to 1)"]


def test_many_lines_of_several_blocks(monkeypatch):
    """pyarrow reads a MiB at a time."""
    content = text_of({"epoch": n, "val_loss": n / 7, "memory_host_peak_bytes": n * 10**6} for n in range(30_000))
    assert len(content) > 2**21
    assert is_read_at_once(content, monkeypatch)
    assert len(check(content)) == 30_000


def test_floats_keep_all_their_digits(monkeypatch):
    drawn = random.Random(1)
    lines = [
        {"epoch": n, "val_loss": drawn.random() * 10.0 ** drawn.randint(-12, 8), "lr_last": drawn.random() / 3}
        for n in range(10_000)
    ]
    content = text_of(lines)
    assert is_read_at_once(content, monkeypatch)
    rows = check(content)
    assert [(row["val_loss"], row["lr_last"]) for row in rows] == [
        (line["val_loss"], line["lr_last"]) for line in lines
    ]


def test_many_files_at_once_are_what_each_of_them_is_alone():
    contents = [text_of(LINES), text_of(LINES).removesuffix(b"\n"), text_of(LINES[1:]), text_of(LINES[:1])]
    assert None not in tables_of(contents)
    for odd in (*ODD.values(), *contents):
        of_both = tables_of([contents[0], odd, contents[2]])
        for content, table in zip([contents[0], odd, contents[2]], of_both, strict=True):
            if table is not None:
                alone, broken = table_of(content, notes := [])
                assert (table.to_pylist(), notes, broken) == (alone.to_pylist(), [], 0), content


@pytest.mark.parametrize(
    "name", ["nothing", "half a line", "half a line between", "a date", "no number", "a byte order mark"]
)
def test_an_odd_file_holds_up_no_other(name):
    first, odd, last = tables_of([text_of(LINES), ODD[name], text_of(LINES[:2])])
    assert (len(first), len(last)) == (3, 2)
    assert (odd is None) == (name != "a date")


@pytest.mark.parametrize(
    "value", [b'"val_top1": 7', b'"memory_host_peak_bytes": -5', b'"throttle_reasons": "' + b"x" * 300 + b'"']
)
def test_a_value_out_of_range_holds_up_its_own_file_alone(value):
    line = b'{"epoch": 0, ' + value + b"}"
    first, none, odd, last = tables_of([text_of(LINES), b"", line, text_of(LINES[:2])])
    assert (len(first), none, odd, len(last)) == (3, None, None, 2)
    check(line)


@pytest.mark.parametrize(
    "line",
    [b'{"epoch": 0, "steps": 1.5}', b'{"epoch": 3}\n{"epoch": 2}', b'{"epoch": -1}',
     b'{"epoch": 1000000001}', b'{"steps": 1}', b'{"epoch": 0, "val_loss": -0}'],
)  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_a_value_to_look_at_in_one_file(line, first):
    contents = [line, text_of(LINES)] if first else [text_of(LINES), line]
    assert tables_of(contents) == [None, None]
    check(line)
