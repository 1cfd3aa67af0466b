"""Texts that are safe to print or to open, and that are read well."""

from __future__ import annotations

from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from ddlbench.texts import aligned, clipped, first_few, limited, number, printable, quoted, say, seconds, shortened


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain µs … 你好", "plain µs … 你好"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("\x9b", "\\x9b"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_what_does_not_print_is_an_escape(text, expected):
    assert printable(text) == expected


def test_a_short_text_stays_and_a_long_one_is_cut_to_the_length():
    assert shortened("x" * 20, 20) == "x" * 20
    assert len(shortened("x" * 21, 20)) == 20
    assert shortened("x" * 50 + "a", 20) != shortened("x" * 50 + "b", 20)


def test_a_text_is_cut_inside_of_the_bracket_that_ends_it():
    assert clipped("zero2 (offload=true fused=false)@4", 23) == "zero2 (offload=true…)@4"
    assert clipped("x" * 30 + "(a)", 20) == "x" * 19 + "…"
    assert clipped("MPT-125m (124131840 parameters) (published)", 30) == "MPT-125m (1241318… (published)"
    assert len(shortened("zero2 (offload_optimizer=true fused=false)", 30)) == 30
    assert shortened("zero2 (offload_optimizer=true fused=false)", 30).endswith(")")


def test_the_first_few_and_how_many_more():
    assert first_few(["a", "b"], 2) == ["a", "b"]
    assert first_few(["a", "b", "c"], 2, "more letters") == ["a", "b", "and 1 more letters"]
    assert [limited([1, 2, 3], 2), limited([1, 2], 2)] == [([1, 2], 1), ([1, 2], 0)]
    assert first_few([1, 2, 0], 2, text=lambda number: f"{1 / number}") == ["1.0", "0.5", "and 1 more"]


def test_what_a_spreadsheet_would_run_is_quoted_and_no_other_text():
    run = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\uff1d1+1"]
    assert list(map(quoted, run)) == [f"'{text}" for text in run]
    others = ["ddp", "", "1-2", "a=b", "'x"]
    assert list(map(quoted, others)) == others


def test_a_table_is_aligned_under_its_headers():
    lines = aligned(["name", "n"], [["ddp", "12"], ["single", "3"]], left={"name"})
    assert lines == ["name     n", "------  --", "ddp     12", "single   3"]
    assert aligned(["a", "b"], [["long", ""]]) == ["a     b", "----  -", "long"]


def test_seconds_and_numbers_have_three_digits_or_more():
    written = {1234.56: "1,234.6 s", 12.34: "12.3 s", 1.234: "1.23 s", 0.01234: "0.0123 s", None: ""}
    assert {value: seconds(value) for value in written} == written
    written = {12345.6: "12,346", 999.96: "1,000", 999.94: "999.9", 123.45: "123.5", 1.234: "1.23", None: ""}
    assert {value: number(value) for value in written} == written


def test_what_is_said_has_escapes_for_what_the_terminal_lacks():
    content = BytesIO()
    terminal = TextIOWrapper(content, encoding="ascii")
    say("a\nb", Path("µ"), stream=terminal)
    assert content.getvalue() == b"a\\nb\n\\xb5\n"


def test_lines_are_one_write_because_a_reader_may_close_its_pipe_after_the_first(monkeypatch):
    terminal, written = TextIOWrapper(BytesIO(), encoding="utf-8"), list[str]()
    monkeypatch.setattr(terminal, "write", written.append)
    say("a", "b", stream=terminal)
    assert list(filter(None, written)) == ["a\nb\n"]
