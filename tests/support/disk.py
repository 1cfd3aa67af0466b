"""For tests of the disk: a file whose pages are in memory and can be dropped, a full disk, a limit of a file's size."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Generator
from mmap import PAGESIZE
from pathlib import Path

import pytest

from ddlbench.data.page_cache import cached_bytes

PAGES = 100
SIZE = PAGES * PAGESIZE - 1  # the last page is not full


def written(folder: Path) -> Path:
    """A file just written, so that its pages are in memory and not on the disk yet. Skips the test where they would
    stay there."""
    path = folder / "data"
    path.write_bytes(bytes(SIZE))
    if not hasattr(os, "posix_fadvise") or _stays(path):
        pytest.skip(f"no page can be dropped in {folder}: it is in memory, or the system has no posix_fadvise")
    path.write_bytes(bytes(SIZE))
    return path


def _stays(path: Path) -> bool:
    """Whether its pages are in memory after the system was asked to drop them; not by the code that is tested."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_bytes(path) == SIZE


def no_space(*_: object) -> None:
    """In place of what writes a file: the disk is full."""
    raise OSError(errno.ENOSPC, "No space left on device")


def fill_disk(disk: Path) -> None:
    with (disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)


@contextlib.contextmanager
def largest_file(size: int) -> Generator[None]:
    """Neither this process nor its children write a larger file, as on a full disk or with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
