"""The program's own folder, names of the splits, folders that appear only when they are complete, kept indices."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlbench.errors import reporting
from ddlbench.files import remove_leftovers, replacing, unfinished_path
from ddlbench.foreign import open_regular

# Names of the training split (True) and the validation split in indices, packed sets and copies, whatever the names of
# the user's folders.
SPLITS = {True: "train", False: "val"}


def home() -> Path:
    """$DDLBENCH_HOME, else ~/.cache/ddlbench."""
    return Path(os.environ.get("DDLBENCH_HOME") or "~/.cache/ddlbench").expanduser()


def make_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Where there is no `folder`, let `make` fill a temporary one beside it, then rename that: an interrupted process
    leaves nothing that looks complete, and of two processes at once the slower one deletes its own folder. Raises
    UserError where the folder cannot be written."""
    if folder.is_dir():
        return
    temporary = unfinished_path(folder, folder.parent)
    try:
        with reporting(f"cannot make {folder}", "set DDLBENCH_HOME or data.root"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
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


def kept_folder(root: Path, cache_dir: str | None) -> Path:
    """`cache_dir`; by default in the data set's own folder, or with the program's files where that is read-only."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return root / ".ddlbench" if os.access(root, os.W_OK) else home() / "indices"


def read_arrays(file: Path, names: Iterable[str]) -> dict[str, NDArray[Any]] | None:
    """The arrays of these names; None if one of them is missing or cannot be read."""
    try:
        with open_regular(file) as stream, np.load(stream) as arrays:  # noqa: TID251 - no pickles
            return {name: arrays[name] for name in names}
    except Exception:  # whatever others have written there
        return None


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Under a temporary name first, so that no process reads half an index. UserError where it cannot be written."""
    with reporting(f"cannot keep the index {file}", "choose data.cache_dir"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            np.savez(stream, allow_pickle=False, **arrays)
