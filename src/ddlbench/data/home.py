"""The program's own folder, names of the splits, folders that appear only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ddlbench.errors import UserError, reporting
from ddlbench.files import remove_leftovers, unfinished_path

# Names of the training split (True) and the validation split in indices, packed sets and copies, whatever the names of
# the user's folders.
SPLITS = {True: "train", False: "val"}


def home() -> Path:
    """$DDLBENCH_HOME, else ~/.cache/ddlbench. Raises UserError where the user has no home, as in some containers."""
    try:
        return Path(os.environ.get("DDLBENCH_HOME") or "~/.cache/ddlbench").expanduser()
    except RuntimeError as error:
        raise UserError(f"the program needs a folder for its files ({error}): set DDLBENCH_HOME") from error


def make_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """If `folder` is missing or empty, let `make` fill a temporary one beside it, then rename it. An interrupted
    process leaves nothing that looks complete. If two processes do this at once, the slower one deletes its own folder.
    Raises UserError where the folder cannot be written."""
    if folder.is_dir() and any(folder.iterdir()):
        return
    temporary = unfinished_path(folder, folder.parent)
    try:
        with reporting(f"cannot make {folder}", "set DDLBENCH_HOME, or choose another folder"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder.parent, folder.name)
            temporary.mkdir(mode=0o700)
            make(temporary)
            temporary.chmod(0o755)
            try:
                temporary.rename(folder)
            except OSError:
                if not (folder.is_dir() and any(folder.iterdir())):  # else another process has finished it first
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
