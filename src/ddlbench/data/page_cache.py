"""The page cache: drop the pages of files (posix_fadvise(2)), count those that are in memory (mincore(2)).

Caches behind the system are not reached: those of a disk, of a RAID controller and of a file server.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

import numpy as np

from ddlbench.data.processes import SCANNERS, in_threads
from ddlbench.errors import reporting
from ddlbench.measure.devices.unknown import total

IN_MEMORY = 1  # the bit of a page in what mincore(2) returns


@dataclass(frozen=True)
class Dropped:
    """What was dropped on one node, or on several. left_bytes: still in memory after; None: not available"""

    files: int
    bytes: int
    left_bytes: int | None

    @classmethod
    def total(cls, parts: Iterable[Dropped]) -> Dropped:
        """Adds the parts one by one: a list of those of a million files would take hundreds of MB."""
        files, bytes_, left_bytes = 0, 0, 0
        for part in parts:
            files, bytes_ = files + part.files, bytes_ + part.bytes
            left_bytes = total((left_bytes, part.left_bytes))
        return cls(files, bytes_, left_bytes)


def drop(files: Iterable[Path]) -> Dropped:
    """Drop the pages of all files. Raises UserError where one cannot be opened.

    Pages that are not on the disk yet cannot be dropped, so the system first writes all of them, once. An fsync of each
    file would make the disk empty its own cache as often as there are files.
    """
    os.sync()
    return Dropped.total(in_threads(drop_file, files, SCANNERS))


def drop_file(path: Path) -> Dropped:
    with reporting(f"cannot read {path}", "check whether it was moved"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return Dropped(1, path.stat().st_size, cached_bytes(path))


def cached_bytes(path: Path) -> int | None:
    """Bytes of a file that are in memory, in whole pages. None where the kernel does not say: since Linux 5.2 it
    reports the truth only to those who own the file or may write it. The file itself is not read."""
    status = path.stat()
    if status.st_size == 0:
        return 0
    if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
        return None
    pages = np.memmap(path, np.uint8, "c")  # private: needs no right to write
    states = np.empty(-(-pages.size // PAGESIZE), np.uint8)
    address, answer = ctypes.c_void_p(pages.ctypes.data), ctypes.c_void_p(states.ctypes.data)
    if ctypes.CDLL(None).mincore(address, ctypes.c_size_t(pages.size), answer):
        return None
    return min(int((states & IN_MEMORY).sum()) * PAGESIZE, status.st_size)
