"""Data copied to each node's own storage before any clock starts, as Lin et al. 2022 did (section IV, "Data Loading").

Every copy is read back from the disk and compared before it gets its name, so whatever lies under a sample's name is
whole. Copies that are there already, of the same size and age as the original, are kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddlbench.data.image_index import SCANNERS
from ddlbench.data.processes import in_threads
from ddlbench.data.tokenfile import replacing
from ddlbench.errors import UserError
from ddlbench.progress import Progress

CHUNK_BYTES = 2**22


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


def node_folder(stage_to: str, name: str, digest: str) -> Path:
    """The folder of one data set on this node. Variables are this node's own, e.g. data.stage_to='$TMPDIR'.

    Raises UserError where one is not set.
    """
    place = Path(os.path.expandvars(stage_to)).expanduser()
    if not place.is_absolute():
        raise UserError(
            f"data.stage_to={stage_to} is {place} here, no absolute path: name a folder of each node's own storage"
        )
    return place / f"{name}-{digest[:16]}"


def stage(parts: Sequence[Part], progress: Progress) -> Staged:
    """Make all copies. Raises UserError where one cannot be made, or is not its original."""
    files, size = sum(part.count for part in parts), sum(part.bytes for part in parts)
    folder = Path(os.path.commonpath([part.copy for part in parts]))
    _require_room(folder, size)
    progress.say(f"staging {files} files ({size / 1e9:.2f} GB) in {folder}")
    pairs = (pair for part in parts for pair in part.pairs())
    copies = in_threads(lambda pair: copy_file(*pair), pairs, SCANNERS)
    return Staged(str(folder), files, size, sum(progress.steps(copies, files, "staging, file", "files")))


def copy_file(original: Path, copy: Path) -> int:
    """Bytes copied: none where the copy is there already."""
    try:
        known = original.stat()
        if not _is_copy(copy, known):
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy_verified(original, copy)
            os.utime(copy, ns=(known.st_atime_ns, known.st_mtime_ns))
            return known.st_size
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "choose a larger data.stage_to" if full else "see to it, or leave data.stage_to out"
        raise UserError(f"cannot stage {original} as {copy} ({error.strerror or error}): {remedy}") from error
    return 0


def _is_copy(copy: Path, known: os.stat_result) -> bool:
    try:
        found = copy.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns) == (known.st_size, known.st_mtime_ns)


def _copy_verified(original: Path, copy: Path) -> None:
    """What is compared comes from the disk, not from memory, where the system can be asked to forget."""
    digest = hashlib.sha256()
    with replacing(copy) as written:
        with original.open("rb") as file:
            for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
                digest.update(chunk)
                written.write(chunk)
        written.flush()
        os.fsync(written.fileno())
        if sys.platform == "linux":
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with Path(written.name).open("rb") as again:
            if hashlib.file_digest(again, "sha256").digest() != digest.digest():
                raise UserError(f"the copy of {original} in {copy.parent} is not what was written: is its disk sound?")


def _require_room(folder: Path, size: int) -> None:
    """Before hours of copying. What is there already is not counted, so it is only asked of an empty place."""
    if folder.exists():
        return
    try:
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror}): choose another data.stage_to") from error
    if free < size:
        folder.rmdir()
        raise UserError(
            f"the data are {size / 1e9:.2f} GB, {folder.parent} has {free / 1e9:.2f} GB free: "
            f"choose a larger data.stage_to, or leave it out"
        )
