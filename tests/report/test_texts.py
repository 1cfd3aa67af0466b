"""Texts that are safe to print, and cells that no spreadsheet runs."""

from __future__ import annotations

import pytest

from ddlbench.report.texts import aligned, printable, quoted, shortened


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


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\uff1d1+1"])
def test_what_a_spreadsheet_would_run_is_quoted(text):
    assert quoted(text) == f"'{text}"


@pytest.mark.parametrize("text", ["ddp", "", "1-2", "a=b", "'x"])
def test_other_texts_are_not(text):
    assert quoted(text) == text


def test_a_table_is_aligned_under_its_headers():
    lines = aligned(["name", "n"], [["ddp", "12"], ["single", "3"]], left={"name"})
    assert lines == ["name     n", "------  --", "ddp     12", "single   3"]
    assert aligned(["a", "b"], [["long", ""]]) == ["a     b", "----  -", "long"]
