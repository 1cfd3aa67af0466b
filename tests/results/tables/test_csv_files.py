"""No text of the CSV files is run by a spreadsheet, and every number has all its digits."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pandas as pd

from ddlbench.results.tables.tables import write_csv
from tests.support.records import tables_of, write_run


def test_a_text_that_a_spreadsheet_would_run_is_quoted_in_every_row_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, framework="=1+1")
    write_run(tmp_path, framework="ddp")
    tables_of(tmp_path).write(tmp_path / "tables")
    table = pd.read_csv(tmp_path / "tables" / "epochs.csv")
    assert sorted(table["framework"]) == ["'=1+1"] * 3 + ["ddp"] * 3
    assert table["data"].eq("sample_images").all()


def test_every_kind_of_cell(tmp_path: Path) -> None:
    columns = {
        "text": pd.array(["plain", "a,b", 'say "so"', None, "two\nlines", "-1"], dtype="string"),
        "int": pd.array([0, -1, None, 2**63 - 1, -(2**63), 7], dtype="Int64"),
        "float": pd.array([3.0, -0.0, None, 1e-5, 123456789.125, 1e22], dtype="Float64"),
        "bool": pd.array([True, None, False, True, None, None], dtype="boolean"),
        "nothing": pd.array([None] * 6, dtype="string"),
    }
    write_csv(pd.DataFrame(columns), tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == (
        "text,int,float,bool,nothing\n"
        "plain,0,3.0,True,\n"
        '"a,b",-1,-0.0,,\n'
        '"say ""so""",,,False,\n'
        ",9223372036854775807,1e-05,True,\n"
        '"two\nlines",-9223372036854775808,123456789.125,,\n'
        "'-1,7,1e+22,,\n"
    )


def test_floats_of_any_bits_keep_all_their_digits(tmp_path: Path) -> None:
    drawn = random.Random(1)
    bits = [struct.unpack("d", struct.pack("Q", drawn.getrandbits(64)))[0] for _ in range(20_000)]
    values = [value for value in bits if math.isfinite(value)]
    write_csv(pd.DataFrame({"value": pd.array(values, dtype="Float64")}), tmp_path / "table.csv")
    assert list(map(float, (tmp_path / "table.csv").read_text().split()[1:])) == values
