"""Where the program keeps what it makes itself, and how a folder or a file comes to be there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from ddlbench.errors import UserError


def home() -> Path:
    """$DDLBENCH_HOME, else ~/.cache/ddlbench."""
    return Path(os.environ.get("DDLBENCH_HOME") or "~/.cache/ddlbench").expanduser()


def make_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a temporary folder beside `folder`, then rename it: an interrupted maker leaves nothing that
    looks whole, and of two makers at once the slower throws its own away.

    Raises UserError where the folder cannot be written.
    """
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        make(temporary)
        temporary.chmod(0o755)  # mkdtemp's folders are the owner's alone
        _rename(temporary, folder)
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror or error}): set DDLBENCH_HOME or data.root") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def replacing(path: Path, through: Path | None = None) -> Generator[BinaryIO]:
    """A file that takes the place of `path` once it is whole and on disk, and leaves nothing behind if it fails.

    through: folder of the file until then, on the same file system; None: that of `path`
    """
    temporary = (through or path.parent) / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _rename(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder.is_dir() and any(folder.iterdir())):  # else it is another maker's, finished first
            raise
