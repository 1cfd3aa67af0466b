"""A packed image set: the files of image folders, byte for byte, in a few large TFRecord files.

    pack.json                      what the set holds; written last: a set without it is incomplete
    train/00000-of-00009.tfrecord  a shard: one record an image
    train/00000-of-00009.idx       DALI's index of the shard: one line "offset size" a record, the frame counted in
    val/...

A record, as TensorFlow's tensorflow/core/lib/io/record_writer.h has it, all little-endian:

    uint64 length | uint32 masked crc32c of the length | payload | uint32 masked crc32c of the payload

A payload is a tf.train.Example (tensorflow/core/example/feature.proto) of an image, with three features in this order:
image/class/label (its class' place in the order of names, from 0), image/encoded (the file's bytes) and image/filename
(<class>/<name>).

    Example   { Features features = 1 }
    Features  { map<string, Feature> feature = 1 }         an entry: key = 1, value = 2
    Feature   { oneof { BytesList bytes_list = 1; Int64List int64_list = 3 } }
    BytesList { repeated bytes value = 1 }                 Int64List { repeated int64 value = 1 [packed] }

In protobuf's encoding each of these is a byte, number * 8 + 2, its length as a varint, and its content. A varint has
seven bits a byte, the lowest first; the eighth says that more follow.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from ddlbench.data.home import SPLITS
from ddlbench.errors import UserError, importing, reporting
from ddlbench.foreign import from_json, open_regular, read_bytes, read_format, regular_size
from ddlbench.texts import GIB

FORMAT = 1
MANIFEST, UNFINISHED = "pack.json", "pack.unfinished.jsonl"
LARGEST_INDEX = GIB  # bytes: fifty million images in one shard
SHARD = re.compile(r"(?:train|val)/[^/\0]{1,200}\.tfrecord")  # no path leads out of the set
AGAIN = "if the set is a copy, copy it again; else pack it again, which repairs damaged shards"
ORDER_SEED = 0  # of the training images' order
Kind = TypeVar("Kind")

HEAD, FOOT = struct.Struct("<QI"), struct.Struct("<I")
FRAME = HEAD.size + FOOT.size  # bytes of a record that are not its payload

Span = tuple[int, int]  # offset and size of a record in its file, in bytes
Extent = tuple[int, int]  # where a part of an Example begins and ends
# What stands before the content of each feature, V for a varint; the group is the content's length.
HEADS = {
    name: re.compile(head.replace(b"V", rb"[\x80-\xff]{0,9}[\x00-\x7f]"))
    for name, head in {
        "image/class/label": rb"\nV\nV\n\x11image/class/label\x12V\x1aV\n([\x01-\x0a])",
        "image/encoded": rb"\nV\n\x0dimage/encoded\x12V\nV\n(V)",
        "image/filename": rb"\nV\n\x0eimage/filename\x12V\nV\n(V)",
    }.items()
}


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
    """The images' numbers in the folders, in the order of a packed split. Training images are shuffled once; otherwise
    every shard, and every reader's shuffle buffer, would hold one class."""
    return RandomState(ORDER_SEED).permutation(samples) if split == "train" else np.arange(samples)


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


def read_manifest(folder: Path) -> Pack:
    """What pack.json says. Raises UserError where there is none, or none that this version reads."""
    path = folder / MANIFEST
    begun = (folder / UNFINISHED).is_file()
    remedy = "it was not packed completely: pack it again" if begun else "give the folder of a packed image set"
    again = f"if the set is a copy, copy it again; else delete {folder} and pack again"
    with reporting(f"{path} cannot be read", remedy):
        content = read_format(path, FORMAT, again)
    try:
        splits = dict[str, PackedSplit]()
        for split in SPLITS.values():
            listed = _checked(content["splits"][split]["shards"], list, "list")
            shards = tuple(from_json(Shard, shard) for shard in listed)
            files = [shard.file for shard in shards]
            if odd := [file for file in files if not (file.startswith(f"{split}/") and SHARD.fullmatch(file))]:
                raise ValueError(f"{odd[0][:40]!a} is no shard of {split}")
            if not files or len(set(files)) < len(files):
                raise ValueError(f"{split} has {len(files)} shards, {len(set(files))} of them different")
            splits[split] = PackedSplit.of(shards)
        classes = tuple(_checked(name, str, "text") for name in _checked(content["classes"], list, "list"))
        return Pack(FORMAT, _checked(content["hash"], str, "text"), classes, splits)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not describe a packed image set ({error!r}): {again}") from error


def _checked(content: object, kind: type[Kind], name: str) -> Kind:
    if not isinstance(content, kind):
        raise TypeError(f"{str(content)[:40]!a} is not a {name}")
    return content


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + FOOT.pack(masked_crc(length)) + payload + FOOT.pack(masked_crc(payload))


def masked_crc(content: bytes) -> int:
    """crc32c, rotated by 15 bits, plus a constant: the plain checksum of data that contain checksums would be weak."""
    crc = crc32c()(content)
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


@cache
def crc32c() -> Callable[[bytes], int]:
    """google-crc32c's function. It is imported here: only packed sets need the library, and a cluster may lack it."""
    with importing("google-crc32c", "pip install google-crc32c"):
        return import_module("google_crc32c").value


def walk(path: Path) -> Iterator[tuple[int, int | None, bytes | str]]:
    """Where every record begins and ends, and its payload or, as text, what is wrong with it. Where the length of a
    record is damaged its end is None, and no other record follows."""
    offset, end = 0, path.stat().st_size
    with open_regular(path) as file:
        while offset < end:
            head = file.read(HEAD.size)
            if len(head) < HEAD.size:
                yield offset, None, f"cut short, the file ends after {len(head)} bytes of its header"
                return
            length, check = HEAD.unpack(head)
            if check != masked_crc(head[:8]):
                yield offset, None, f"its length ({length}) does not match its checksum"
                return
            after = offset + length + FRAME
            if after > end:
                yield offset, None, f"cut short, {after - end} of its {length + FRAME} bytes are missing"
                return
            payload = file.read(length)
            sound = FOOT.unpack(file.read(FOOT.size))[0] == masked_crc(payload)
            yield offset, after, payload if sound else "its payload does not match its checksum"
            offset = after


def index_text(spans: Iterable[Span]) -> bytes:
    """What DALI's tfrecord2idx writes."""
    return b"".join(b"%d %d\n" % span for span in spans)


def index_of(shard: Path) -> list[Span]:
    """What the index of a shard holds. Raises UserError where it cannot be used."""
    path, spans = shard.with_suffix(".idx"), list[Span]()
    with reporting(f"index {path} cannot be read", AGAIN):
        text = read_bytes(path, LARGEST_INDEX)
    try:
        for number, line in enumerate(text.splitlines(), 1):
            if len(words := line.split()) != 2:
                raise ValueError(f"line {number} is not two numbers")
            spans.append((int(words[0]), int(words[1])))
    except ValueError as error:
        raise UserError(f"{path} is not an index ({error}): {AGAIN}") from error
    return spans


def encode(label: int, encoded: bytes, filename: bytes) -> bytes:
    """The Example of an image. label: not negative"""
    contents = (
        (b"image/class/label", 3, _varint(label)),
        (b"image/encoded", 1, encoded),
        (b"image/filename", 1, filename),
    )
    features = (_field(1, name) + _field(2, _field(kind, _field(1, content))) for name, kind, content in contents)
    return _field(1, b"".join(_field(1, feature) for feature in features))


def decode(data: memoryview, start: int, end: int) -> tuple[int, bytes, Extent]:
    """Label and filename of the Example in these bytes, and where its image lies, which is not read. Raises ValueError
    for bytes that `encode` does not write."""
    extents, place = list[Extent](), start
    for name, head in HEADS.items():
        match = head.match(data, place, end)
        if match is None:
            raise ValueError(f"it has no {name} at its byte {place - start}")
        place = match.end() + _number(match[1])
        extents.append((match.end(), place))
    if place != end:
        raise ValueError(f"its features end at its byte {place - start}, it has {end - start}")
    label, image, filename = extents
    return _number(data[slice(*label)]), bytes(data[slice(*filename)]), image


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def _number(varint: bytes | memoryview) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint))
