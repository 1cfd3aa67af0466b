"""steps.parquet and ranks.parquet of an attempt. No table of the report is made of them; a reader who opens them later
is warned of those that cannot be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ddlbench.texts import printable

FILES = ("steps.parquet", "ranks.parquet")
# The first and the last bytes; before the last, the length of the footer (parquet.apache.org, "File Format").
MAGIC = b"PAR1"
SHORTEST = 12


def damaged(attempt: Path) -> list[str]:
    """A warning for each incomplete Parquet file. Only the first and last bytes are read. A run that has not ended, or
    was killed, has a folder with a file for each epoch."""
    reasons = ((file, _why(file)) for name in FILES for file in _files(attempt / name))
    return [f"{printable(str(file))} cannot be read ({why})" for file, why in reasons if why is not None]


def _files(path: Path) -> Iterator[Path]:
    if os.path.isdir(path):  # noqa: PTH112  # False where it may not be looked at, unlike Path.is_dir
        yield from sorted(path.glob("epoch-*.parquet"))
    elif os.path.lexists(path):
        yield path


def _why(file: Path) -> str | None:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # before it is opened: a pipe would wait for its writer
            return "it is not a regular file"
        with file.open("rb") as opened:
            first = opened.read(len(MAGIC))
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - 8))
            last = opened.read(8)
    except OSError as error:
        return error.strerror or type(error).__name__
    if size == 0:
        return "it is empty"
    if first != MAGIC:
        return "it is no Parquet file"
    complete = size >= SHORTEST and last[4:] == MAGIC and int.from_bytes(last[:4], "little") <= size - SHORTEST
    return None if complete else "its end is missing"
