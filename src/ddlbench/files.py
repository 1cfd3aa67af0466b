"""Files that appear under their names, or replace others, only when they are complete and on disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from ddlbench.heartbeat import this_place
from ddlbench.texts import digest

LONGEST_NAME = 200  # bytes: a file name has 255, and that of a temporary file adds up to 30
ABANDONED_S = 24 * 3600  # where the process cannot be checked: on another node, in another container


@contextlib.contextmanager
def replacing(path: Path, through: Path | None = None) -> Generator[BinaryIO]:
    """A file that replaces `path` when it is complete and on disk; after a failure it is removed.

    through: folder of the temporary file, on the same file system. None: the folder of `path`; leftovers are removed
        from it first, which takes too long if it is done often
    """
    if through is None:
        remove_leftovers(path.parent, path.name)
    temporary = unfinished_path(path, through or path.parent)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_json(path: Path, content: Any, through: Path | None = None) -> None:
    """Replace a JSON file. through: as of `replacing`"""
    with replacing(path, through) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def appeared(path: Path) -> bool:
    """Whether a file exists that another node may have made since this one looked. An NFS client remembers for up to a
    minute that a name was missing (nfs(5), lookupcache); when a folder is opened again, it asks the server."""
    if not path.exists():
        for folder in reversed(path.parents):
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
    return path.exists()


def unfinished_path(path: Path, folder: Path) -> Path:
    """A new hidden name in `folder`, with the name of the target, a hash of this host and the process."""
    return folder / f".{_stem(path.name)}~{digest(this_place())}~{os.getpid()}~{secrets.token_hex(4)}"


def _stem(name: str) -> str:
    """The name of a target in that of its temporary file; a hash where both together would not fit into a file name."""
    return name if len(os.fsencode(name)) <= LONGEST_NAME else digest(name, 64)


def remove_leftovers(folder: Path, target: str = "", abandoned_s: float = ABANDONED_S) -> None:
    """Remove temporary files that killed processes left in a folder, never those of a running one.

    target: the name of what they would have become; "": whatever it is
    abandoned_s: since they were written to, where the process cannot be checked
    """
    stem = re.escape(_stem(target)) if target else ".+"
    name = re.compile(rf"\.{stem}~(.+)~(\d+)~[0-9a-f]{{8}}", re.DOTALL)
    with contextlib.suppress(OSError):  # another process may remove the same
        entries = [(entry, name.fullmatch(entry.name)) for entry in folder.iterdir()]
        for entry, by in entries:
            if by is None:
                continue
            if by[1] == digest(this_place()):
                abandoned = not psutil.pid_exists(int(by[2]))
            else:
                written = max(path.stat().st_mtime for path in (entry, *entry.rglob("*")))
                abandoned = time.time() - written > abandoned_s
            if abandoned:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
