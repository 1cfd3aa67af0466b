"""The program's own folder, and folders that appear under their names only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ddlbench.errors import UserError
from ddlbench.files import remove_leftovers, unfinished_path


def home() -> Path:
    """$DDLBENCH_HOME, else ~/.cache/ddlbench."""
    return Path(os.environ.get("DDLBENCH_HOME") or "~/.cache/ddlbench").expanduser()


def sample_home(root: str | None) -> Path:
    """Where a sample set is made: data.root, else the program's own folder. UserError for what is no folder."""
    place = Path(root).expanduser() if root else home()
    if place.exists() and not place.is_dir():
        raise UserError(f"data.root={place} is not a folder: give one, which may be missing, or leave data.root out")
    return place


def make_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a temporary folder beside `folder`, then rename it: an interrupted process leaves nothing that
    looks complete, and of two processes at once the slower one deletes its own folder.

    Raises UserError where the folder cannot be written.
    """
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        unfinished = unfinished_path(folder, folder.parent)
        unfinished.mkdir(mode=0o700)
        temporary = unfinished
        make(temporary)
        temporary.chmod(0o755)
        _rename(temporary, folder)
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror or error}): set DDLBENCH_HOME or data.root") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _rename(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder.is_dir() and any(folder.iterdir())):  # else another process has finished it first
            raise
