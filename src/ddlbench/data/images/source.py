"""The images of one split by their position in the order of classes and names: in separate files, or in the records
of a packed set. Both kinds are picklable."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddlbench.data.images.index import Files
from ddlbench.data.staging import StagedFiles
from ddlbench.errors import UserError, reporting
from ddlbench.foreign import open_regular


@dataclass(frozen=True)
class _Images:
    """Images by class and file name. original: the user's folder, where `where` is this node's copy of it"""

    where: Path
    classes: tuple[str, ...]
    files: Files
    original: Path | None = field(default=None, kw_only=True)

    def within(self, i: int) -> str:
        """<class>/<file>"""
        return f"{self.classes[self.files.labels[i]]}/{self.files.name(i)}"

    def name(self, i: int) -> str:
        """For the record."""
        return f"{self.where.name}/{self.within(i)}"


class FolderSource(_Images):
    """where/<class>/<file>."""

    def files_to_stage(self, copy: Path) -> StagedFiles:
        """All files of the split, to be copied into the folder `copy`."""
        names = map(self.within, range(len(self.files)))
        return StagedFiles(self.where, copy, names, len(self.files), int(self.files.sizes.sum()))

    def path(self, i: int) -> Path:
        return self.where / self.within(i)

    def content(self, i: int) -> bytes:
        """An image as its file has it. Raises UserError where it cannot be read."""
        moved = "check whether it was moved after the data set was indexed"
        other = "check that data.stage_to is the same folder for all ranks of a node"
        with reporting(f"cannot read {self.path(i)}", other if self.original else moved):
            return self.path(i).read_bytes()

    def place(self, i: int) -> str:
        """For error messages: the user's file."""
        return str((self.original or self.where) / self.within(i))


@dataclass(frozen=True)
class PackedSource(_Images):
    """shards: names of the files in `where`; image i begins at byte starts[i] of shards[holders[i]]"""

    shards: tuple[str, ...]
    holders: NDArray[np.int32]
    starts: NDArray[np.int64]

    def files_to_stage(self, copy: Path) -> StagedFiles:
        sizes = [(self.where / shard).stat().st_size for shard in self.shards]
        return StagedFiles(self.where, copy, self.shards, len(self.shards), sum(sizes))

    def content(self, i: int) -> memoryview:
        """No copy: the first access to the bytes waits for the disk."""
        start = int(self.starts[i])
        return mapped(self.where / self.shards[self.holders[i]])[start : start + int(self.files.sizes[i])]

    def place(self, i: int) -> str:
        """For error messages: the position in the user's shard."""
        shard = (self.original or self.where) / self.shards[self.holders[i]]
        return f"{self.name(i)}, at byte {self.starts[i]} of {shard},"


Source = FolderSource | PackedSource


@cache
def mapped(path: Path) -> memoryview:
    """A file as mapped memory, made once per process and never closed. Raises UserError."""
    try:
        with open_regular(path) as file:
            return memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise UserError(f"cannot read {path}: {error}") from error
