"""steps.parquet and ranks.parquet of an attempt. No table of the report is made of them; a reader who opens them later
is warned of those that cannot be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pyarrow.parquet import read_metadata

from ddlbench.texts import printable, shortened

FILES = ("steps.parquet", "ranks.parquet")
LONGEST = 200  # letters of an error


def damaged(attempt: Path) -> list[str]:
    """A warning for each incomplete Parquet file. Only its footer is read. A run that has not ended, or
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
        read_metadata(file)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or shortened(printable(str(error).strip()), LONGEST)
    return None
