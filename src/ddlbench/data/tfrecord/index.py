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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlbench.data.images.index import SCANNERS, Files
from ddlbench.data.images.kept import read_arrays, write_arrays
from ddlbench.data.images.source import PackedSource, mapped
from ddlbench.data.tfrecord.example import Extent, bytes_of, features, number_of
from ddlbench.data.tfrecord.packed import ENCODED, FILENAME, LABEL, Pack, index_of, index_path, open_pack, read_manifest
from ddlbench.data.tfrecord.records import FOOT, FRAME, HEAD
from ddlbench.errors import UserError

VERSION = 1  # of the kept index
ARRAYS = ("names", "ends", "sizes", "labels", "holders", "starts")
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
    file = _kept(pack, split, cache)
    arrays = _read(file, split, pack)
    if arrays is None:
        arrays = scan([root / shard.file for shard in pack.splits[split].shards], len(pack.classes))
        write_arrays(file, arrays)
    return _source(root, split, pack, arrays)


def open_source(root: Path, split: str, cache: Path) -> PackedSource:
    """As `prepare_source` left it, without a look at the shards: a thousand ranks may ask at once."""
    pack = read_manifest(root)
    arrays = _read(_kept(pack, split, cache), split, pack)
    return _source(root, split, pack, arrays) if arrays else prepare_source(root, split, cache)


def _read(file: Path, split: str, pack: Pack) -> dict[str, NDArray[Any]] | None:
    """The kept finds; None where there are none, or none that fit the set."""
    arrays = read_arrays(file, ARRAYS)
    if arrays is None or not Files(*(arrays[name] for name in ARRAYS[:4])).sound(len(pack.classes)):
        return None
    holders, starts, shape = arrays["holders"], arrays["starts"], arrays["labels"].shape
    if (holders.dtype, holders.shape, starts.dtype, starts.shape) != (np.int32, shape, np.int64, shape):
        return None
    shards = len(pack.splits[split].shards)
    return arrays if ((holders >= 0) & (holders < shards) & (starts >= 0)).all() else None


def _source(root: Path, split: str, pack: Pack, arrays: Mapping[str, NDArray[Any]]) -> PackedSource:
    files, shards = Files(*(arrays[name] for name in ARRAYS[:4])), pack.splits[split].shards
    names = tuple(Path(shard.file).name for shard in shards)
    return PackedSource(root / split, pack.classes, files, names, arrays["holders"], arrays["starts"])


def _kept(pack: Pack, split: str, cache: Path) -> Path:
    key = json.dumps(
        [VERSION, split, *((shard.file, shard.bytes, shard.sha256) for shard in pack.splits[split].shards)]
    )
    return cache / f"packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"


def scan(shards: list[Path], classes: int) -> dict[str, NDArray[Any]]:
    """All images by class and name. They are Python objects one shard at a time only: a million would be gigabytes."""
    with ThreadPoolExecutor(SCANNERS) as pool:
        found = list(pool.map(lambda holder, shard: table(images(holder, shard, classes)), range(len(shards)), shards))
    every = np.concatenate([table([]), *found])
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


def table(images: Iterable[Image]) -> NDArray[Any]:
    """A row an image; names are padded with NUL, which no file's name holds."""
    rows = list(images)
    width = max((len(image.name) for image in rows), default=1)
    kinds = {"label": np.int32, "name": f"S{width}", "holder": np.int32, "start": np.int64, "size": np.int64}
    return np.array(rows, dtype=list(kinds.items()))


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
            found = image(data, (offset + HEAD.size, offset + size - FOOT.size), holder)
            if not 0 <= found.label < classes:
                raise ValueError(f"its label is {found.label}, there are {classes} classes")
            yield found
        except (KeyError, ValueError) as error:
            raise UserError(f"{shard} holds no image at byte {offset} ({error}): {AGAIN}") from error


def image(data: memoryview, example: Extent, holder: int) -> Image:
    found = features(data, example)
    start, end = bytes_of(data, found[ENCODED])
    name = bytes(data[slice(*bytes_of(data, found[FILENAME]))]).rpartition(b"/")[2]
    return Image(number_of(data, found[LABEL]), name, holder, start, end - start)
