"""Indices of image sets, kept for the next run as arrays in a file: indexing a million images is slow."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlbench.data.home import home
from ddlbench.errors import UserError
from ddlbench.files import replacing
from ddlbench.foreign import open_regular


def kept_folder(root: Path, cache_dir: str | None) -> Path:
    """`cache_dir`; by default in the data set's own folder, or with the program's files where that is read-only."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return root / ".ddlbench" if os.access(root, os.W_OK) else home() / "indices"


def read_arrays(file: Path, names: Iterable[str]) -> dict[str, NDArray[Any]] | None:
    """The arrays of these names; None where there are none, or none that can be read."""
    try:
        with open_regular(file) as stream, np.load(stream) as arrays:  # noqa: TID251 - no pickles
            return {name: arrays[name] for name in names}
    except Exception:  # whatever others have written there
        return None


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Under a temporary name first, so that no process reads half an index. UserError where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            np.savez(stream, allow_pickle=False, **arrays)
    except OSError as error:
        raise UserError(f"cannot keep the index {file} ({error.strerror or error}): choose data.cache_dir") from error
