"""Data copied to each node's own storage before any clock starts, as Lin et al. 2022 did (section IV, "Data Loading").

Every copy is read back from the disk and compared before it gets its final name, so a copy with its final name is
complete. Existing copies with the original's size and modification time (whole seconds) are kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddlbench.data.processes import SCANNERS, in_threads
from ddlbench.errors import UserError, reporting
from ddlbench.files import remove_leftovers, replacing
from ddlbench.foreign import sha256_of
from ddlbench.progress import Progress

CHUNK_BYTES = 2**22
UNFINISHED = ".unfinished"  # folder of incomplete copies
ABANDONED_S = 3600  # a file that was not written to for this time belongs to no running process


@dataclass(frozen=True)
class StagedFiles:
    """Files that a node copies. original, copy: folders, the same one where the originals are read; names: of the
    `count` files in either."""

    original: Path
    copy: Path
    names: Iterable[str]
    count: int
    bytes: int


@dataclass(frozen=True)
class Staged:
    """The copies of one node. copied_bytes: without the copies that existed before."""

    folder: str
    files: int
    bytes: int
    copied_bytes: int


def node_storage(stage_to: str) -> Path:
    """`data.stage_to` on this node, whose variables it may name: '$TMPDIR'. Raises UserError for a relative path."""
    path = Path(os.path.expanduser(os.path.expandvars(stage_to)))  # noqa: PTH111  # Path's raises for unknown users
    if "$" in str(path) or not path.is_absolute():
        raise UserError(
            f"data.stage_to={stage_to} is {str(path)!r} on this node, which is not an absolute path: give a folder on "
            f"each node; write a variable of the node in quotes and without braces, data.stage_to='$TMPDIR'"
        )
    return path


def node_folder(stage_to: str, name: str, digest: str) -> Path:
    """The folder of one data set on this node."""
    return node_storage(stage_to) / f"{name}-{digest[:16]}"


def stage(sets: Sequence[StagedFiles], progress: Progress) -> Staged:
    """Make all copies. Raises UserError where there is nothing to copy, one cannot be made, or differs from its
    original."""
    if not sets:
        raise UserError("data.stage_to: the data set has no files to copy: set data.stage_to=null")
    files, size = sum(part.count for part in sets), sum(part.bytes for part in sets)
    folder = Path(os.path.commonpath([part.copy.parent for part in sets]))
    require_room(folder, size)
    unfinished = folder / UNFINISHED
    with reporting(f"cannot make {unfinished}", "choose another data.stage_to"):
        unfinished.mkdir(parents=True, exist_ok=True)
    remove_leftovers(unfinished, abandoned_s=ABANDONED_S)
    progress.say(f"staging {files} files ({size / 1e9:.2f} GB) in {folder}")
    pairs = ((part.original / name, part.copy / name) for part in sets for name in part.names)
    copies = in_threads(lambda pair: copy_file(*pair, unfinished), pairs, SCANNERS)
    return Staged(str(folder), files, size, sum(progress.steps(copies, files, "staging, file", "files")))


def require_room(folder: Path, size: int) -> None:
    """Raise UserError before hours of copying. An existing folder is not checked: its files may be complete copies."""
    if folder.exists():
        if folder.stat().st_uid != os.getuid():
            raise UserError(
                f"{folder} belongs to user {folder.stat().st_uid}: set data.stage_to to a folder of your own"
            )
        return
    there = next(parent for parent in folder.parents if parent.is_dir())
    free = shutil.disk_usage(there).free
    if free < size:
        raise UserError(
            f"the data are {size / 1e9:.2f} GB, {there} has {free / 1e9:.2f} GB free: "
            f"choose a larger data.stage_to, or remove it"
        )


def copy_file(original: Path, copy: Path, unfinished: Path) -> int:
    """Return the bytes copied, 0 where the copy exists already. On Linux the page cache is dropped before the
    comparison, so that it reads the disk and not memory."""
    try:
        status, digest = original.stat(), hashlib.sha256()
        with suppress(FileNotFoundError):
            present = copy.stat()  # whole seconds: not every file system keeps more
            if (present.st_size, int(present.st_mtime)) == (status.st_size, int(status.st_mtime)):
                return 0
        copy.parent.mkdir(parents=True, exist_ok=True)
        with replacing(copy, unfinished) as written:
            with original.open("rb") as file:
                for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
                    digest.update(chunk)
                    written.write(chunk)
            if (size := written.tell()) != status.st_size:
                raise UserError(
                    f"{original} had {status.st_size} bytes and now has {size}: it must not change during a run"
                )
            written.flush()
            os.fsync(written.fileno())
            if sys.platform == "linux":
                os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if sha256_of(Path(written.name)) != digest.hexdigest():
                raise UserError(f"the copy of {original} in {copy.parent} differs from the original: check the disk")
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        return size
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "choose a larger data.stage_to" if full else "check the file system, or remove data.stage_to"
        raise UserError(f"cannot stage {original} as {copy} ({error.strerror or error}): {remedy}") from error
