"""The list of image files: scanned once and kept as one compact file, since listing a million files is slow."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlbench.data.home import SPLITS, home
from ddlbench.data.processes import SCANNERS
from ddlbench.errors import UserError, reporting
from ddlbench.files import replacing
from ddlbench.foreign import open_regular
from ddlbench.texts import digest, first_few

EXTENSIONS = (".jpg", ".jpeg", ".png")
VERSION = 2  # of the file format


@dataclass(frozen=True)
class Files:
    """The files of one split in order of class, then of the bytes of the name. They are arrays, because a million
    Python strings would take 100 MB in every worker.

    names: file names as bytes of equal length, padded with NUL; sizes: bytes of each file; labels: class of each file
    """

    names: NDArray[np.bytes_]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def consistent(self, classes: int) -> bool:
        """Whether the arrays fit each other and the number of classes: a kept index may have come with the data."""
        kinds = self.names.dtype.kind, self.sizes.dtype, self.labels.dtype
        shapes = {self.names.shape, self.sizes.shape, self.labels.shape}
        if kinds != ("S", np.int64, np.int32) or shapes != {(self.labels.size,)}:
            return False
        labels = ((self.labels >= 0) & (self.labels < classes)).all()
        return bool(labels and (self.sizes >= 0).all() and (np.char.find(self.names, b"/") < 0).all())

    def name(self, i: int) -> str:
        return os.fsdecode(self.names[i])


KEYS = tuple(Files.__dataclass_fields__)


@dataclass(frozen=True)
class Index:
    """hash: sha256 over class, name and size of every training and validation file. It covers neither their content
        nor the names of the folders above the classes, so a copy of a data set has the hash of the original.
    stamps: when each folder was last changed, in nanoseconds
    """

    classes: tuple[str, ...]
    splits: dict[str, Files]
    hash: str
    stamps: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class FolderLayout:
    """root/<train_dir>/<class>/<image> and root/<val_dir>/<class>/<image>.

    val_optional: without a validation folder there are no validation samples; False: that is an error
    """

    root: Path
    train_dir: str
    val_dir: str
    val_optional: bool = False

    @property
    def splits(self) -> tuple[Path, Path]:
        return self.root / self.train_dir, self.root / self.val_dir

    @property
    def present(self) -> list[Path]:
        """The folders of the splits that exist, the training split first."""
        train, val = self.splits
        return [train] if self.val_optional and not val.exists() else [train, val]

    def classes(self) -> list[str]:
        """The class folders, by name. Raises UserError where a folder is missing or empty, or the splits differ."""
        classes = list[list[str]]()
        for folder in self.present:
            if not folder.is_dir():
                raise UserError(f"there is no folder {folder}: put the images into {folder}/<class>/*.JPEG")
            with os.scandir(folder) as listed:
                entries = [entry for entry in listed if not entry.name.startswith(".")]
                try:
                    # Links alone: a thousand ranks list a thousand classes at once. FileNotFoundError for a link to
                    # nothing, which may have been a class.
                    for link in (entry for entry in entries if entry.is_symlink()):
                        link.stat()
                    names = sorted(entry.name for entry in entries if entry.is_dir())
                except OSError as error:  # links in a loop, too
                    raise UserError(
                        f"{error.filename} cannot be read ({error.strerror}): restore or remove the link"
                    ) from error
            if not names:
                raise UserError(f"{folder} holds no class folders: sort the images into {folder}/<class>/*.JPEG")
            classes.append(names)
        train, val = classes[0], classes[-1]
        if train != val:
            odd = sorted(set(train) ^ set(val))
            raise UserError(
                f"{self.splits[0]} and {self.splits[1]} do not hold the same classes ({len(train)} and {len(val)}): "
                f"only one has {', '.join(first_few(odd, 3))}; make the folders' names equal"
            )
        return train


def prepare_index(layout: FolderLayout, cache_dir: str | None) -> Index:
    """The index as the folders are now: the kept one if no folder changed since, else a new one, which is kept.

    A file added, removed or renamed changes its folder's modification time. (A file overwritten in its place does not:
    delete the index then.)
    """
    classes = layout.classes()
    folders = [*layout.present, *(split / name for split in layout.present for name in classes)]
    stamps = [folder.stat().st_mtime_ns for folder in folders]
    kept = _read(file := _cache_file(layout, cache_dir))
    if kept is not None and kept.stamps == stamps:
        return kept
    index = replace(scan(layout), stamps=stamps)
    about = json.dumps({"classes": index.classes, "hash": index.hash, "stamps": stamps}).encode()
    arrays = {f"{role}_{key}": getattr(files, key) for role, files in index.splits.items() for key in KEYS}
    write_arrays(file, {"about": np.frombuffer(about, np.uint8), **arrays})
    return index


def open_index(layout: FolderLayout, cache_dir: str | None) -> Index:
    """The index as `prepare_index` left it, without reading the folders: a thousand ranks may open it at once."""
    return _read(_cache_file(layout, cache_dir)) or prepare_index(layout, cache_dir)


def scan(layout: FolderLayout) -> Index:
    """List every class folder, in about twice the index's size of memory. UserError for a folder without an image."""
    classes, hashed = layout.classes(), hashlib.sha256()
    splits: dict[str, Files] = {}
    dangling: list[str] = []
    for role, folder in zip(SPLITS.values(), layout.splits, strict=True):
        names, sizes, counts = [np.empty(0, "S1")], [np.empty(0, np.int64)], list[int]()
        folders = [folder / name for name in classes] if folder in layout.present else []
        with ThreadPoolExecutor(SCANNERS) as pool:
            for within, (files, bytes_, links) in zip(folders, pool.map(list_images, folders), strict=True):
                for file, size in zip(files.tolist(), bytes_.tolist(), strict=True):
                    hashed.update(b"%b%b\0%d\n" % (os.fsencode(f"{role}/{within.name}/"), file, size))
                dangling += [str(within / link) for link in links]
                names.append(files)
                sizes.append(bytes_)
                counts.append(len(files))
        labels = np.repeat(np.arange(len(folders), dtype=np.int32), np.array(counts, np.int64))
        splits[role] = Files(np.concatenate(names), np.concatenate(sizes), labels)
    if dangling:
        named = ", ".join(first_few(dangling, 3))
        raise UserError(f"{len(dangling)} image links point to no file ({named}): restore their files or remove them")
    return Index(tuple(classes), splits, hashed.hexdigest())


def list_images(folder: Path) -> tuple[NDArray[np.bytes_], NDArray[np.int64], list[str]]:
    """The images of a class folder, by name: names and sizes as in Files; the names of links without a target, or in a
    loop."""
    with os.scandir(folder) as entries:
        named = [entry for entry in entries if entry.name.lower().endswith(EXTENSIONS) and entry.name[0] != "."]
    dangling = {entry.name for entry in named if entry.is_symlink() and not Path(entry).exists()}
    files = (entry for entry in named if entry.name not in dangling and entry.is_file())
    images = sorted((os.fsencode(entry.name), entry.stat().st_size) for entry in files)
    if not images and not dangling:
        raise UserError(f"{folder} holds no image ({', '.join(EXTENSIONS)}): fill or remove the folder")
    names, sizes = [name for name, _ in images], [size for _, size in images]
    return np.array(names, np.bytes_), np.array(sizes, np.int64), sorted(dangling)


def _cache_file(layout: FolderLayout, cache_dir: str | None) -> Path:
    key = [VERSION, str(layout.root.resolve()), layout.train_dir, layout.val_dir]
    return kept_file(layout.root, cache_dir, "images", key)


def kept_file(root: Path, cache_dir: str | None, kind: str, key: list[Any]) -> Path:
    """Where an index is kept: in `cache_dir`; by default in the data set's own folder, or with the program's files if
    that is read-only. key: of what it depends on"""
    usual = root / ".ddlbench" if os.access(root, os.W_OK) else home() / "indices"
    return (usual if cache_dir is None else Path(cache_dir)) / f"{kind}-{digest(key, 16)}.npz"


def read_arrays(file: Path, names: Iterable[str]) -> dict[str, NDArray[Any]] | None:
    """The arrays of these names; None if one of them is missing or cannot be read."""
    try:
        with open_regular(file) as stream, np.load(stream) as arrays:  # noqa: TID251 - no pickles
            return {name: arrays[name] for name in names}
    except Exception:  # whatever others have written there
        return None


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The file appears when it is complete: no process reads half an index. UserError where it cannot be written."""
    with reporting(f"cannot keep the index {file}", "set DDLBENCH_HOME, or data.cache_dir of a run"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            np.savez(stream, allow_pickle=False, **arrays)


def _read(file: Path) -> Index | None:
    """The kept index; None where there is none, or none that can be read."""
    arrays = read_arrays(file, ["about", *(f"{role}_{key}" for role in SPLITS.values() for key in KEYS)])
    if arrays is None:
        return None
    splits = {role: Files(*(arrays[f"{role}_{key}"] for key in KEYS)) for role in SPLITS.values()}
    try:
        about: dict[str, Any] = json.loads(arrays["about"].tobytes())
        index = Index(tuple(about["classes"]), splits, str(about["hash"]), about["stamps"])
        for name in about["classes"]:
            if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\0"} & set(name):
                return None
        return index if all(files.consistent(len(index.classes)) for files in splits.values()) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
