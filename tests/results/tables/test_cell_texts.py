"""Cells that no spreadsheet runs, and aligned tables."""

from __future__ import annotations

import pytest

from ddlbench.results.tables.cell_texts import aligned, number, quoted, seconds


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


@pytest.mark.parametrize(
    ("value", "text"), [(1234.56, "1,234.6 s"), (12.34, "12.3 s"), (1.234, "1.23 s"), (0.01234, "0.0123 s"), (None, "")]
)
def test_seconds(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(12345.6, "12,346"), (123.45, "123.5"), (1.234, "1.23"), (None, "")])
def test_numbers(value, text):
    assert number(value) == text
