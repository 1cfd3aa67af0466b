"""Pages of a file leave the memory, as mincore(2) counts them."""

from __future__ import annotations

import os
import tracemalloc
from mmap import PAGESIZE
from pathlib import Path

import pytest

from ddlbench.data.page_cache import Dropped, cached_bytes, drop
from ddlbench.errors import UserError
from tests.support.disk import SIZE, written


def test_dropped_pages_are_gone_and_come_back_when_they_are_read(tmp_path: Path) -> None:
    on_disk = written(tmp_path)
    assert cached_bytes(on_disk) == SIZE
    assert drop([on_disk]) == Dropped(files=1, bytes=SIZE, left_bytes=0)
    assert cached_bytes(on_disk) == 0
    with on_disk.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        file.read(3 * PAGESIZE)
    assert cached_bytes(on_disk) == 3 * PAGESIZE


def test_files_are_added_up(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 300), ("empty", 0)):
        (tmp_path / name).write_bytes(bytes(size))
    dropped = drop(tmp_path / name for name in ("a", "b", "empty"))
    assert (dropped.files, dropped.bytes) == (3, 310)
    assert Dropped.total([Dropped(1, 5, 2), Dropped(2, 7, 1)]) == Dropped(3, 12, 3)
    assert Dropped.total([Dropped(1, 5, 2), Dropped(2, 7, None)]).left_bytes is None


def test_a_data_set_of_many_files_is_added_up_without_a_list_of_them() -> None:
    """A rank drops before each epoch whose peak of memory is measured."""
    parts = (Dropped(1, 2, 0) for _ in range(100_000))
    tracemalloc.start()
    try:
        assert Dropped.total(parts) == Dropped(100_000, 200_000, 0)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*/absent \(No such file or directory\)"):
        drop([tmp_path / "absent"])
