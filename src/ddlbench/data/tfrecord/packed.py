"""A packed image set: the files of image folders, byte for byte, in a few large TFRecord files.

pack.json                      what the set holds; written last: a set without it is incomplete
train/00000-of-00009.tfrecord  a shard: one tf.train.Example an image
train/00000-of-00009.idx       DALI's index of the shard
val/...
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from ddlbench.data.home import SPLITS
from ddlbench.data.tfrecord.records import Span, read_index
from ddlbench.errors import UserError, reporting
from ddlbench.foreign import from_json, read_bytes, read_format, regular_size
from ddlbench.texts import GIB

FORMAT = 1
MANIFEST, UNFINISHED = "pack.json", "pack.unfinished.jsonl"
LARGEST_INDEX = GIB  # bytes: fifty million images in one shard
SHARD = re.compile(r"(?:train|val)/[^/\0]{1,200}\.tfrecord")  # no path leads out of the set
AGAIN = "if the set is a copy, copy it again; else pack it again, which repairs damaged shards"
ORDER_SEED = 0  # of the training images' order
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Shard:
    """file: its path in the set; bytes: of the file; sha256: of its content."""

    file: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PackedSplit:
    samples: int
    bytes: int
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, shards: tuple[Shard, ...]) -> PackedSplit:
        return cls(sum(shard.samples for shard in shards), sum(shard.bytes for shard in shards), shards)


@dataclass(frozen=True)
class Pack:
    """hash: of the image folders, as their index has it (data/images/index.py)."""

    format: int
    hash: str
    classes: tuple[str, ...]
    splits: Mapping[str, PackedSplit]

    @property
    def shards(self) -> list[Shard]:
        return [shard for split in SPLITS.values() for shard in self.splits[split].shards]


def order(split: str, samples: int) -> NDArray[np.int64]:
    """Which image of the folders lies where in a packed split. Training images are shuffled once; otherwise every
    shard, and every reader's shuffle buffer, would hold one class."""
    return RandomState(ORDER_SEED).permutation(samples) if split == "train" else np.arange(samples)


def index_path(shard: Path) -> Path:
    return shard.with_suffix(".idx")


def is_packed(folder: Path) -> bool:
    """Whether `folder` is a packed set, finished or not."""
    return (folder / MANIFEST).is_file() or (folder / UNFINISHED).is_file()


def open_pack(folder: Path) -> Pack:
    """A set whose shards have the size that pack.json says. Raises UserError."""
    pack = read_manifest(folder)
    for shard in pack.shards:
        path = folder / shard.file
        size = regular_size(path)
        if size != shard.bytes:
            fault = "is missing" if size is None else f"has {size} bytes, {MANIFEST} says {shard.bytes}"
            raise UserError(f"shard {path} {fault}: {AGAIN}")
    return pack


def index_of(shard: Path) -> list[Span]:
    """What the index of a shard holds. Raises UserError where it cannot be used."""
    path = index_path(shard)
    try:
        with reporting(f"index {path} cannot be read", AGAIN):
            return read_index(read_bytes(path, LARGEST_INDEX))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is not an index ({error}): {AGAIN}") from error


def read_manifest(folder: Path) -> Pack:
    """What pack.json says. Raises UserError where there is none, or none that this version reads."""
    path = folder / MANIFEST
    begun = (folder / UNFINISHED).is_file()
    remedy = "it was not packed completely: pack it again" if begun else "give the folder of a packed image set"
    with reporting(f"{path} cannot be read", remedy):
        content = read_format(path, FORMAT, AGAIN)
    try:
        splits = {name: PackedSplit.of(_shards(name, content["splits"][name]["shards"])) for name in SPLITS.values()}
        classes = tuple(_checked(name, str, "text") for name in _checked(content["classes"], list, "list"))
        return Pack(FORMAT, _checked(content["hash"], str, "text"), classes, splits)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not describe a packed image set ({error!r}): {AGAIN}") from error


def _shards(split: str, content: object) -> tuple[Shard, ...]:
    """Each once, and none outside the split's folder."""
    shards = tuple(from_json(Shard, shard) for shard in _checked(content, list, "list"))
    files = [shard.file for shard in shards]
    if odd := next((file for file in files if not (file.startswith(f"{split}/") and SHARD.fullmatch(file))), None):
        raise ValueError(f"{odd[:40]!a} is no shard of {split}")
    if not shards or len(set(files)) < len(files):
        raise ValueError(f"{split} has {len(files)} shards, {len(set(files))} of them different")
    return shards


def _checked(content: object, kind: type[Kind], name: str) -> Kind:
    if not isinstance(content, kind):
        raise TypeError(f"{str(content)[:40]!a} is not a {name}")
    return content
