"""A steps.parquet or ranks.parquet that cannot be read is named, and all runs are reported as they would be without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddlbench.record.record import EpochFiles
from ddlbench.results.tables.run_rows import PARQUET, damaged_parquet
from tests.support.records import tables_of, write_run

TABLE = pa.table({"epoch": [0, 0], "step": [0, 1]})


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def shortened(path: Path) -> None:
    """The footer's length says more than there is."""
    path.write_bytes(b"PAR1" + path.read_bytes()[-8:])


MAGIC = "Parquet magic bytes not found in footer"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, MAGIC),
    "shortened": (shortened, "smaller than the size reported by footer"),
    "footer": (lambda path: path.write_bytes(b"PAR1" + b"\x7f" * 999 + path.read_bytes()[-8:]), "Couldn't deserialize"),
    "foreign": (lambda path: path.write_bytes(os.urandom(999)), MAGIC),
    "text": (lambda path: path.write_text("epoch,step\n"), MAGIC),
    "empty": (lambda path: path.write_bytes(b""), "Parquet file size is 0 bytes"),
    "few bytes": (lambda path: path.write_bytes(b"PAR1"), "Parquet file size is 4 bytes"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is not a regular file"),
    "link": (lambda path: (path.unlink(), path.symlink_to("nowhere")), "No such file or directory"),
}


def two_runs(results: Path) -> Path:
    """Two attempts with their files; the folder of the first."""
    for repeat in (1, 0):
        folder = write_run(results, repeat=repeat)
        for name in PARQUET:
            pq.write_table(TABLE, folder / name)
    return folder


@pytest.mark.parametrize("name", PARQUET)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_named_and_all_runs_are_reported(tmp_path: Path, name: str, kind: str) -> None:
    damage, said = DAMAGES[kind]
    folder = two_runs(tmp_path)
    before = tables_of(tmp_path)
    assert before.warnings == []
    damage(folder / name)
    if kind != "pipe":  # reading it would wait
        with pytest.raises((OSError, ValueError)):
            pd.read_parquet(folder / name)
    after = tables_of(tmp_path)
    (warning,) = after.warnings
    assert warning.startswith(f"{folder / name} cannot be read (")
    assert said in warning
    for table in ("runs", "epochs", "scaling"):
        pd.testing.assert_frame_equal(getattr(after, table), getattr(before, table))
    assert after.scaling["runs_ok"].tolist() == [2]


def test_of_a_run_that_was_killed_the_damaged_epoch_is_named_and_the_others_stay(tmp_path: Path) -> None:
    """Its steps.parquet is still a folder. At the end of a run such a folder is kept as it is."""
    files = EpochFiles(tmp_path / "steps.parquet", TABLE.schema)
    for epoch in range(3):
        files.append(epoch, [TABLE])
    assert damaged_parquet(tmp_path) == []
    second = tmp_path / "steps.parquet" / "epoch-000001.parquet"
    truncated(second)
    (warning,) = damaged_parquet(tmp_path)
    assert warning.startswith(f"{second} cannot be read ({MAGIC}")
    with pytest.raises(OSError, match=r"epoch-000001.parquet is damaged"):
        files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.parquet"]
    second.unlink()
    files.close()
    assert pq.read_table(tmp_path / "steps.parquet").num_rows == 4


def test_an_attempt_without_these_files_has_nothing_to_warn_of(tmp_path: Path) -> None:
    assert damaged_parquet(write_run(tmp_path)) == []
    assert damaged_parquet(tmp_path / "nowhere") == []
