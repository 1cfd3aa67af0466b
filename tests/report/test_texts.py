"""Cells that no spreadsheet runs, and aligned tables."""

from __future__ import annotations

import pytest

from ddlbench.report.texts import aligned, quoted


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
