"""A packed image set written by hand: tf.train.Examples in TFRecord shards, an index beside each, pack.json."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from ddlbench.data.images.index import FolderLayout, prepare_index
from ddlbench.data.tfrecord import decode
from ddlbench.data.tools import pack


def write_pack(layout: FolderLayout, root: Path, shards: int = 2) -> Path:
    """The images of the folders, in an order of their own. Checksums of records are zero: no reader needs them."""
    index = prepare_index(layout, None)
    about = {"format": 1, "hash": index.hash, "classes": index.classes, "splits": {}}
    for split, folder, files in zip(("train", "val"), layout.splits, index.splits.values(), strict=True):
        (root / split).mkdir(parents=True)
        parts = np.array_split(np.random.RandomState(0).permutation(len(files)), shards)
        written = []
        for number, part in enumerate(parts):
            names = [(f"{index.classes[files.labels[i]]}/{files.name(i)}", int(files.labels[i])) for i in part]
            examples = [example((folder / name).read_bytes(), label, name) for name, label in names]
            file = f"{split}/{number:05d}-of-{shards:05d}.tfrecord"
            content = write_shard(root / file, examples)
            sha256 = hashlib.sha256(content).hexdigest()
            written.append({"file": file, "samples": len(part), "bytes": len(content), "sha256": sha256})
        about["splits"][split] = {"samples": len(files), "shards": written}
    (root / "pack.json").write_text(json.dumps(about))
    return root


def pack_here(layout: FolderLayout, target: Path, shard_bytes: int = 10**6) -> Path:
    """A set that the program packs, in this process: to start another takes longer than the work."""
    with patch("ddlbench.data.tools.in_processes", lambda work, jobs, _: map(work, jobs)):
        pack(layout, target, shard_bytes, processes=1)
    return target


def flip(file: Path, place: int) -> None:
    """One bit of the byte at this place."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


class Image(NamedTuple):
    encoded: bytes
    label: int
    filename: str


def image_of(payload: bytes) -> Image:
    """The image in an Example."""
    label, filename, (start, end) = decode(memoryview(payload), 0, len(payload))
    return Image(payload[start:end], label, filename.decode(errors="surrogateescape"))


def write_shard(path: Path, examples: list[bytes]) -> bytes:
    records = [struct.pack("<QI", len(content), 0) + content + bytes(4) for content in examples]
    offsets = np.cumsum([0, *map(len, records)])
    lines = [f"{offset} {len(record)}\n" for offset, record in zip(offsets, records, strict=False)]
    path.with_suffix(".idx").write_text("".join(lines))
    path.write_bytes(b"".join(records))
    return b"".join(records)


def example(encoded: bytes, label: int, name: str) -> bytes:
    features = {
        "image/class/label": field(3, field(1, varint(label))),
        "image/encoded": field(1, field(1, encoded)),
        "image/filename": field(1, field(1, name.encode())),
    }
    entries = (field(1, field(1, key.encode()) + field(2, value)) for key, value in features.items())
    return field(1, b"".join(entries))


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])
