"""Where the images of a packed set lie: the records of its TFRecord shards are looked through once, and the finds kept.

    pack.json                      classes, hash, and of each shard its file, samples and bytes
    train/00000-of-00009.tfrecord  a tf.train.Example an image: image/encoded, image/class/label, image/filename
    train/00000-of-00009.idx       one line "offset size" per record

Images are numbered by class and name, as in their original folders (data/images/index.py), wherever they are in the
shards. So an epoch has the same order as over the folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlbench.data.home import read_arrays, write_arrays
from ddlbench.data.images.index import KEYS, Files
from ddlbench.data.images.source import PackedSource, mapped
from ddlbench.data.processes import SCANNERS
from ddlbench.data.tfrecord.packed import Pack, index_of, index_path, open_pack, read_image, read_manifest
from ddlbench.data.tfrecord.records import FOOT, FRAME, HEAD
from ddlbench.errors import UserError

VERSION = 1  # of the kept index
ARRAYS = (*KEYS, "holders", "starts")
AGAIN = "copy or pack the set again"


class Image(NamedTuple):
    """In order of class, then name. start, size: of the encoded image in its shard, in bytes."""

    label: int
    name: bytes
    holder: int
    start: int
    size: int


def prepare_source(root: Path, split: str, cache: Path) -> PackedSource:
    """The split's images, from the kept finds where no shard has changed since. Raises UserError for a damaged set."""
    pack = open_pack(root)
    source = _read(root, split, pack, file := _kept(pack, split, cache))
    if source is None:
        arrays = scan([root / shard.file for shard in pack.splits[split].shards], len(pack.classes))
        write_arrays(file, arrays)
        source = _source(root, split, pack, arrays)
    return source


def open_source(root: Path, split: str, cache: Path) -> PackedSource:
    """As `prepare_source` left it, without a look at the shards: a thousand ranks may ask at once."""
    pack = read_manifest(root)
    return _read(root, split, pack, _kept(pack, split, cache)) or prepare_source(root, split, cache)


def _read(root: Path, split: str, pack: Pack, file: Path) -> PackedSource | None:
    """From the kept finds; None where there are none, or none that fit the set."""
    arrays = read_arrays(file, ARRAYS)
    source = _source(root, split, pack, arrays) if arrays else None
    if source is None or not source.files.sound(len(pack.classes)):
        return None
    holders, starts, shape = source.holders, source.starts, source.files.labels.shape
    if (holders.dtype, holders.shape, starts.dtype, starts.shape) != (np.int32, shape, np.int64, shape):
        return None
    return source if ((holders >= 0) & (holders < len(source.shards)) & (starts >= 0)).all() else None


def _source(root: Path, split: str, pack: Pack, arrays: Mapping[str, NDArray[Any]]) -> PackedSource:
    files, shards = Files(*(arrays[key] for key in KEYS)), pack.splits[split].shards
    names = tuple(Path(shard.file).name for shard in shards)
    return PackedSource(root / split, pack.classes, files, names, arrays["holders"], arrays["starts"])


def _kept(pack: Pack, split: str, cache: Path) -> Path:
    key = json.dumps(
        [VERSION, split, *((shard.file, shard.bytes, shard.sha256) for shard in pack.splits[split].shards)]
    )
    return cache / f"packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"


def scan(shards: list[Path], classes: int) -> dict[str, NDArray[Any]]:
    """All images by class and name. They are Python objects one shard at a time only: a million would be gigabytes."""

    def table(holder: int, shard: Path) -> NDArray[Any]:
        """A row an image; names are padded with NUL, which no file's name holds."""
        rows = list(images(holder, shard, classes))
        width = max((len(image.name) for image in rows), default=1)
        kinds = {"label": np.int32, "name": f"S{width}", "holder": np.int32, "start": np.int64, "size": np.int64}
        return np.array(rows, dtype=list(kinds.items()))

    with ThreadPoolExecutor(SCANNERS) as pool:
        every = np.concatenate(list(pool.map(table, range(len(shards)), shards)))
    every = every[np.lexsort((every["name"], every["label"]))]
    lengths, letters = np.char.str_len(every["name"]), np.ascontiguousarray(every["name"]).view(np.uint8)
    filled = np.arange(every["name"].itemsize) < lengths[:, None]
    return {
        "names": letters.reshape(filled.shape)[filled],
        "ends": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "sizes": every["size"].copy(),
        "labels": every["label"].copy(),
        "holders": every["holder"].copy(),
        "starts": every["start"].copy(),
    }


def images(holder: int, shard: Path, classes: int) -> Iterator[Image]:
    """Raises UserError for an index that does not fit its shard, and a record that is no Example of an image in one of
    `classes` classes."""
    data = mapped(shard)
    spans = index_of(index_path(shard))
    if isinstance(spans, str):
        raise UserError(f"{spans}: {AGAIN}")
    for offset, size in spans:
        try:
            if (length := int.from_bytes(data[offset : offset + 8], "little")) != size - FRAME:
                raise ValueError(f"its length is {length}, {size - FRAME} by the index")
            label, name, (start, end) = read_image(data, (offset + HEAD.size, offset + size - FOOT.size))
            if not 0 <= label < classes:
                raise ValueError(f"its label is {label}, there are {classes} classes")
            yield Image(label, name.rpartition(b"/")[2], holder, start, end - start)
        except ValueError as error:
            raise UserError(f"{shard} holds no image at byte {offset} ({error}): {AGAIN}") from error
