"""No text of a table is run by a spreadsheet."""

from __future__ import annotations

from ddlbench.report.read import read_all
from ddlbench.report.spreadsheets import for_spreadsheets
from ddlbench.report.tables import make_tables
from tests.support.records import write_run


def test_a_text_that_a_spreadsheet_would_run_is_quoted_in_every_row_of_it(tmp_path):
    write_run(tmp_path, framework="=1+1")
    write_run(tmp_path, framework="ddp")
    table = for_spreadsheets(make_tables(read_all([tmp_path])).epochs)
    assert sorted(table["framework"]) == ["'=1+1"] * 3 + ["ddp"] * 3
    assert table["data"].eq("sample_images").all()
