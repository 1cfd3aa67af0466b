"""The CSV files are pandas's, to the last digit; no text of them is run by a spreadsheet."""

from __future__ import annotations

import math
import random
import struct

import pandas as pd
import pytest

from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.csv_files import ROWS, write_csv
from ddlbench.results.tables.tables import make_tables
from tests.support.records import write_run

FLOATS = [
    0.0, -0.0, 1.0, 3.0, -384.0, 0.1, 1 / 3, 1e-4, 9.999e-5, 1e-5, 1e-7, 5e-324, 1e15, 123456789012345.6, 1e16, 1e22,
    -1.7976931348623157e308, 0.30000000000000004, 123456789.125, None,
]  # fmt: skip


def written(table, folder):
    """The bytes of the file and those of pandas's."""
    write_csv(table, folder / "own.csv")
    table.to_csv(folder / "pandas.csv", index=False)
    return (folder / "own.csv").read_bytes(), (folder / "pandas.csv").read_bytes()


def test_a_text_that_a_spreadsheet_would_run_is_quoted_in_every_row_of_it(tmp_path):
    write_run(tmp_path, framework="=1+1")
    write_run(tmp_path, framework="ddp")
    make_tables(read_all([tmp_path])).write(tmp_path / "tables")
    table = pd.read_csv(tmp_path / "tables" / "epochs.csv")
    assert sorted(table["framework"]) == ["'=1+1"] * 3 + ["ddp"] * 3
    assert table["data"].eq("sample_images").all()


def test_every_kind_of_cell_is_written_as_pandas_writes_it(tmp_path):
    texts = ["plain", "a,b", 'say "so"', "", None, "ünï → 漢字", "' quoted", "two\nlines", "x" * 10_000, "1e-05"]
    columns = {
        "text": pd.array((texts * 2), dtype="string"),
        "int": pd.array([0, -1, None, 2**63 - 1, -(2**63)] * 4, dtype="Int64"),
        "float": pd.array(FLOATS, dtype="Float64"),
        "bool": pd.array([True, None, False, True] * 5, dtype="boolean"),
        "nothing": pd.array([None] * 20, dtype="Float64"),
        "a name, with a comma": pd.array(range(20), dtype="Int64"),
    }
    own, pandas = written(pd.DataFrame(columns), tmp_path)
    assert own == pandas
    assert own.count(b"\n") == 1 + 20 + 2  # and of the two texts of two lines


@pytest.mark.parametrize("kind", ["digits", "bits"])
def test_floats_keep_all_their_digits(tmp_path, kind):
    """Of the sizes of seconds, shares and losses, and of any bits at all."""
    drawn = random.Random(1)
    sizes = [drawn.random() * 10 ** drawn.randint(-8, 8) for _ in range(20_000)]
    bits = [struct.unpack("d", struct.pack("Q", drawn.getrandbits(64)))[0] for _ in range(20_000)]
    values = sizes if kind == "digits" else [value for value in bits if math.isfinite(value)]
    own, pandas = written(pd.DataFrame({"value": pd.array(values, dtype="Float64")}), tmp_path)
    assert own == pandas


def test_more_rows_than_are_text_at_a_time(tmp_path):
    table = pd.DataFrame({"n": pd.array(range(ROWS + 1), dtype="Int64")})
    own, pandas = written(table, tmp_path)
    assert own == pandas


def test_no_row_and_a_column_that_knows_nothing(tmp_path):
    assert written(pd.DataFrame({"a": [], "b": []}), tmp_path)[0] == b"a,b\n"
    own, pandas = written(pd.DataFrame([{"a": None, "b": "x"}]).convert_dtypes(), tmp_path)
    assert own == pandas == b"a,b\n,x\n"
