"""Data copied to each node's own storage before any clock starts, as Lin et al. 2022 did (section IV, "Data Loading").

Every copy is read back from the disk and compared before it gets its name, so whatever this program left under the name
of a sample is whole. Copies that are there already, of the original's size and second of writing, are kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddlbench.data.home import replacing
from ddlbench.data.images.index import SCANNERS
from ddlbench.data.processes import in_threads
from ddlbench.errors import UserError
from ddlbench.progress import Progress

CHUNK_BYTES = 2**22
SPLITS = {True: "train", False: "val"}  # folders of the copies, whatever the originals are called
UNFINISHED = ".unfinished"  # folder of copies in the making
ABANDONED_S = 3600  # one that nobody has written to for so long is nobody's any more


@dataclass(frozen=True)
class Part:
    """Files that a node reads. original, copy: folders; names: of the files below either, `count` of them."""

    original: Path
    copy: Path
    names: Iterable[str]
    count: int
    bytes: int

    def pairs(self) -> Iterator[tuple[Path, Path]]:
        return ((self.original / name, self.copy / name) for name in self.names)


@dataclass(frozen=True)
class Staged:
    """What one node has now. copied_bytes: those that were not there before."""

    folder: str
    files: int
    bytes: int
    copied_bytes: int


def node_storage(stage_to: str) -> Path:
    """`data.stage_to` on this node, whose variables it may name: '$TMPDIR'. Raises UserError for no absolute path."""
    path = Path(os.path.expandvars(stage_to)).expanduser()
    if not path.is_absolute():
        raise UserError(
            f"data.stage_to={stage_to} is {str(path)!r} here, no absolute path: name a folder of each node's own "
            f"storage; a variable of the node in quotes and without braces, data.stage_to='$TMPDIR'"
        )
    return path


def node_folder(stage_to: str, name: str, digest: str) -> Path:
    """The folder of one data set on this node."""
    return node_storage(stage_to) / f"{name}-{digest[:16]}"


def stage(parts: Sequence[Part], progress: Progress) -> Staged:
    """Make all copies. Raises UserError where one cannot be made, or is not its original."""
    files, size = sum(part.count for part in parts), sum(part.bytes for part in parts)
    folder = Path(os.path.commonpath([part.copy.parent for part in parts]))
    require_room(folder, size)
    unfinished = folder / UNFINISHED
    clear(unfinished)
    progress.say(f"staging {files} files ({size / 1e9:.2f} GB) in {folder}")
    pairs = (pair for part in parts for pair in part.pairs())
    copies = in_threads(lambda pair: copy_file(*pair, unfinished), pairs, SCANNERS)
    return Staged(str(folder), files, size, sum(progress.steps(copies, files, "staging, file", "files")))


def require_room(folder: Path, size: int) -> None:
    """Raise UserError before hours of copying. In a folder that is there already, what it holds would count too."""
    if folder.exists():
        if folder.stat().st_uid != os.getuid():
            raise UserError(f"{folder} is user {folder.stat().st_uid}'s: choose a data.stage_to of your own")
        return
    there = next(parent for parent in folder.parents if parent.is_dir())
    free = shutil.disk_usage(there).free
    if free < size:
        raise UserError(
            f"the data are {size / 1e9:.2f} GB, {there} has {free / 1e9:.2f} GB free: "
            f"choose a larger data.stage_to, or leave it out"
        )


def clear(unfinished: Path) -> None:
    """Make the folder, and free it from what killed runs left; another job's copier may be at work in it."""
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        for path in unfinished.iterdir():
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink(missing_ok=True)
    except FileNotFoundError:  # the other one has just finished it
        pass
    except OSError as error:
        raise UserError(f"cannot make {unfinished} ({error.strerror}): choose another data.stage_to") from error


def copy_file(original: Path, copy: Path, unfinished: Path) -> int:
    """Bytes copied: none where the copy is there already."""
    try:
        known = original.stat()
        if _is_copy(copy, known):
            return 0
        copy.parent.mkdir(parents=True, exist_ok=True)
        _copy_verified(original, copy, unfinished, known.st_size)
        os.utime(copy, ns=(known.st_atime_ns, known.st_mtime_ns))
        return known.st_size
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "choose a larger data.stage_to" if full else "see to it, or leave data.stage_to out"
        raise UserError(f"cannot stage {original} as {copy} ({error.strerror or error}): {remedy}") from error


def _is_copy(copy: Path, known: os.stat_result) -> bool:
    """Whole seconds: not every file system keeps more."""
    try:
        found = copy.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, int(found.st_mtime)) == (known.st_size, int(known.st_mtime))


def _copy_verified(original: Path, copy: Path, unfinished: Path, size: int) -> None:
    """What is compared comes from the disk, not from memory, where the system can be asked to forget."""
    digest = hashlib.sha256()
    with replacing(copy, unfinished) as written:
        with original.open("rb") as file:
            for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
                digest.update(chunk)
                written.write(chunk)
        if written.tell() != size:
            raise UserError(f"{original} had {size} bytes and now {written.tell()}: who writes to it?")
        written.flush()
        os.fsync(written.fileno())
        if sys.platform == "linux":
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with Path(written.name).open("rb") as again:
            if hashlib.file_digest(again, "sha256").digest() != digest.digest():
                raise UserError(f"the copy of {original} in {copy.parent} is not what was written: is its disk sound?")
