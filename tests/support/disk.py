"""Files for tests of the disk: one whose pages are in memory and can be dropped, one that leaves no room."""

from __future__ import annotations

import contextlib
from mmap import PAGESIZE
from pathlib import Path

import pytest

from ddlbench.data.page_cache import can_drop, drop

PAGES = 100
SIZE = PAGES * PAGESIZE - 1  # the last page is not full


def written(folder: Path) -> Path:
    """A file just written, so that its pages are in memory and not on the disk yet. Skips the test where they would
    stay there."""
    path = folder / "data"
    path.write_bytes(bytes(SIZE))
    if not can_drop() or drop([path]).left_bytes == SIZE:
        pytest.skip(f"no page can be dropped in {folder}: it is in memory, or the system has no posix_fadvise")
    path.write_bytes(bytes(SIZE))
    return path


def fill_disk(disk: Path) -> None:
    with (disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)
