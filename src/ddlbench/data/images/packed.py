"""Packed image sets (data/tfrecord.py) as training data, with the crops and flips of data/images/folders.py.

The records of the shards are read once, and the position of each image is kept. Images are numbered by class and
name, as in their original folders (data/images/index.py), wherever they are in the shards. So an epoch has the same
order as over the folders.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlbench.data.home import SPLITS
from ddlbench.data.images.folders import FolderSource, ImageFolders
from ddlbench.data.images.index import Files, kept_file, read_arrays, write_arrays
from ddlbench.data.processes import SCANNERS
from ddlbench.data.staging import StagedFiles
from ddlbench.data.tfrecord import AGAIN, FOOT, FRAME, HEAD, MANIFEST, decode, index_of, open_pack, read_manifest
from ddlbench.errors import UserError
from ddlbench.foreign import open_regular
from ddlbench.job import Model

VERSION = 2  # of the kept index


@dataclass(frozen=True)
class PackedFiles(Files):
    """The images of one split in its shards: image i begins at byte starts[i] of shard number holders[i]."""

    holders: NDArray[np.int32]
    starts: NDArray[np.int64]

    def fits(self, classes: int, shards: int) -> bool:
        """Whether a kept index, which may have come with the data, fits the set."""
        kinds, shapes = (self.holders.dtype, self.starts.dtype), {self.holders.shape, self.starts.shape}
        if kinds != (np.int32, np.int64) or shapes != {self.labels.shape}:
            return False
        within = ((self.holders >= 0) & (self.holders < shards) & (self.starts >= 0)).all()
        return bool(within) and self.consistent(classes)


COLUMNS = tuple(PackedFiles.__dataclass_fields__)


@dataclass(frozen=True)
class PackedSource(FolderSource):
    """shards: names of the files in `where`"""

    files: PackedFiles
    shards: tuple[str, ...]

    def content(self, i: int) -> memoryview:
        """A view of the mapped file: the first access to its bytes waits for the disk."""
        start = int(self.files.starts[i])
        return mapped(self.where / self.shards[self.files.holders[i]])[start : start + int(self.files.sizes[i])]

    def place(self, i: int) -> str:
        shard = self.named(self.shards[self.files.holders[i]])
        return f"{self.where.name}/{self.within(i)}, at byte {self.files.starts[i]} of {shard},"

    def files_to_stage(self) -> StagedFiles:
        size = sum((self.original / shard).stat().st_size for shard in self.shards)
        return StagedFiles(self.original, self.where, self.shards, len(self.shards), size)


@cache
def mapped(path: Path) -> memoryview:
    """A file as mapped memory, made once per process and never closed. Raises UserError."""
    try:
        with open_regular(path) as file:
            return memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise UserError(f"cannot read {path}: {error}") from error


@dataclass
class PackedImages(ImageFolders):
    """ImageFolders whose files are in TFRecord shards. Checksums of records are not computed while training."""

    mapped = True

    def check(self, model: Model, validate: bool = True) -> None:
        pack = read_manifest(self.folder())
        for key in ("train_dir", "val_dir"):
            if (name := getattr(self, key)) not in pack.splits:
                raise UserError(f"data.{key}={name} is no split of {self.folder()}: choose {' or '.join(pack.splits)}")
        self.check_fits(len(pack.classes), model)

    def folder(self) -> Path:
        if self.root is None:
            raise UserError(f"data={self.name} needs data.root=...: the folder of a packed image set, with {MANIFEST}")
        return Path(self.root)

    def prepare(self) -> None:
        """Reads every record once, where no index of these shards is kept. UserError for a damaged set."""
        open_pack(self.folder())
        for train in SPLITS:
            self.original(train)

    def original(self, train: bool) -> PackedSource:
        """From the index that `prepare` kept; the shards are not read, because a thousand ranks may ask at once. The
        hash is that of the image folders that were packed: packing does not change the data."""
        pack, split = read_manifest(self.folder()), self.train_dir if train else self.val_dir
        shards, samples = pack.splits[split].shards, pack.splits[split].samples
        key = [VERSION, split, *((shard.file, shard.bytes, shard.sha256) for shard in shards)]
        file = kept_file(self.folder(), self.cache_dir, "packed", key)
        arrays = read_arrays(file, COLUMNS)
        files = PackedFiles(**arrays) if arrays else None
        if files is None or not files.fits(len(pack.classes), len(shards)):
            files = scan([self.folder() / shard.file for shard in shards], len(pack.classes))
            if len(files) != samples:
                raise UserError(f"the indices of {split} have {len(files)} images, {MANIFEST} {samples}: {AGAIN}")
            write_arrays(file, vars(files))
        folder, names = self.folder() / split, tuple(Path(shard.file).name for shard in shards)
        return PackedSource(folder, folder, pack.classes, files, pack.hash, names)


def scan(shards: list[Path], classes: int) -> PackedFiles:
    """All images by class and name. They are Python objects one shard at a time only: a million would be gigabytes."""
    with ThreadPoolExecutor(SCANNERS) as pool:
        tables = pool.map(lambda holder: images_of(shards[holder], holder, classes), range(len(shards)))
        merged = np.concatenate(list(tables))
    merged = merged[np.lexsort((merged["names"], merged["labels"]))]
    return PackedFiles(**{name: merged[name].copy() for name in COLUMNS})


def images_of(shard: Path, holder: int, classes: int) -> NDArray[Any]:
    """One row for each image: starts and sizes are of the encoded image in its shard, in bytes; names are padded with
    NUL, which no file's name holds. Raises UserError for an index that does not fit its shard, and a record that is no
    Example of an image in one of `classes` classes."""
    data, rows = mapped(shard), list[tuple[int, bytes, int, int, int]]()
    for offset, size in index_of(shard):
        try:
            if (length := int.from_bytes(data[offset : offset + 8], "little")) != size - FRAME:
                raise ValueError(f"its length is {length}, {size - FRAME} by the index")
            label, name, (start, end) = decode(data, offset + HEAD.size, offset + size - FOOT.size)
            if not 0 <= label < classes:
                raise ValueError(f"its label is {label}, there are {classes} classes")
            rows.append((label, name.rpartition(b"/")[2], holder, start, end - start))
        except ValueError as error:
            raise UserError(f"{shard} holds no image at byte {offset} ({error}): {AGAIN}") from error
    width = max((len(name) for _, name, *_ in rows), default=1)
    kinds = {"labels": "i4", "names": f"S{width}", "holders": "i4", "starts": "i8", "sizes": "i8"}
    return np.array(rows, dtype=list(kinds.items()))
