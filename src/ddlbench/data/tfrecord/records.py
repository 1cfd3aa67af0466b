"""TFRecord files, as TensorFlow's tensorflow/core/lib/io/record_writer.h has them: one record after another, each

    uint64 length | uint32 masked crc32c of the length | payload | uint32 masked crc32c of the payload

all little-endian, and DALI's index of them: one line "offset size" a record, the frame counted in.

A payload is a tf.train.Example, here as far as image sets use it: features that are bytes or whole numbers.

    Example   { Features features = 1 }
    Features  { map<string, Feature> feature = 1 }         an entry: key = 1, value = 2
    Feature   { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3 } }
    BytesList { repeated bytes value = 1 }                 Int64List { repeated int64 value = 1 [packed] }

(tensorflow/core/example/feature.proto). In protobuf's encoding a field is a key, number * 8 + wire type, and a value:
a varint (type 0), 8 or 4 bytes (1, 5), or a length and that many bytes (2).
Every function that reads a part of an Example raises ValueError for other bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ddlbench.errors import importing
from ddlbench.foreign import open_regular

HEAD, FOOT = struct.Struct("<QI"), struct.Struct("<I")
FRAME = HEAD.size + FOOT.size  # bytes of a record that are not its payload

Span = tuple[int, int]  # offset and size of a record in its file, in bytes
Extent = tuple[int, int]  # where a part of an Example begins and ends
BYTES_LIST, INT64_LIST = 1, 3


class BadRecord(NamedTuple):
    """What is wrong with a record. next: where the following one begins; None where its length is not known."""

    what: str
    next: int | None


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


def read_record(file: BinaryIO, offset: int, end: int) -> bytes | BadRecord:
    """The payload of the record at `offset` of a file of `end` bytes."""
    file.seek(offset)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return BadRecord(f"cut short, the file ends after {len(head)} bytes of its header", None)
    length, check = HEAD.unpack(head)
    if check != masked_crc(head[:8]):
        return BadRecord(f"its length ({length}) does not match its checksum", None)
    after = offset + length + FRAME
    if after > end:
        return BadRecord(f"cut short, {after - end} of its {length + FRAME} bytes are missing", None)
    payload = file.read(length)
    if FOOT.unpack(file.read(FOOT.size))[0] != masked_crc(payload):
        return BadRecord("its payload does not match its checksum", after)
    return payload


def walk(path: Path, spans: Sequence[Span] = ()) -> Iterator[tuple[int, bytes | BadRecord]]:
    """(offset, payload or what is wrong) of every record. After a damaged length it continues at the next record
    of `spans`, an index of the file, or ends if there is none."""
    end, offset = path.stat().st_size, 0
    with open_regular(path) as file:
        while offset < end:
            read = read_record(file, offset, end)
            yield offset, read
            after = offset + len(read) + FRAME if isinstance(read, bytes) else read.next
            offset = min((start for start, _ in spans if start > offset), default=end) if after is None else after


def index_text(spans: Iterable[Span]) -> bytes:
    """What DALI's tfrecord2idx writes."""
    return b"".join(b"%d %d\n" % span for span in spans)


def read_index(text: bytes) -> list[Span]:
    """Raises ValueError for other text."""
    lines = [tuple(map(int, line.split())) for line in text.splitlines()]
    if bad := next((number for number, line in enumerate(lines, 1) if len(line) != 2), None):
        raise ValueError(f"line {bad} is not two numbers")
    return [(line[0], line[1]) for line in lines]


def encode(features: Mapping[str, bytes | int]) -> bytes:
    """Features of one value each, by name. Numbers must not be negative."""
    entries = b""
    for name, value in sorted(features.items()):
        kind, content = (BYTES_LIST, value) if isinstance(value, bytes) else (INT64_LIST, _varint(value))
        feature = _delimited(kind, _delimited(1, content))
        entries += _delimited(1, _delimited(1, name.encode()) + _delimited(2, feature))
    return _delimited(1, entries)


def features(data: memoryview, example: Extent) -> dict[str, Extent]:
    """Name of each feature -> where its Feature lies."""
    entries = fields(data, one(data, example, 1), 1)
    return {bytes(data[slice(*one(data, entry, 1))]).decode(): one(data, entry, 2) for entry in entries}


def bytes_of(data: memoryview, extents: Mapping[str, Extent], name: str, kind: int = BYTES_LIST) -> Extent:
    """Where the bytes of a feature lie, which has this one value; `extents`: all features, as `features` gives them."""
    if name not in extents:
        raise ValueError(f"it has no {name}")
    try:
        return one(data, one(data, extents[name], kind), 1)
    except ValueError as error:
        raise ValueError(f"{name} is not one value of type {'bytes' if kind == BYTES_LIST else 'int'}") from error


def number_of(data: memoryview, extents: Mapping[str, Extent], name: str) -> int:
    """Packed or not, the number is where the field begins."""
    place, end = bytes_of(data, extents, name, INT64_LIST)
    number, after = varint(data, place, end)
    if after != end:
        raise ValueError(f"{name} is not one value of type int")
    return number


def one(data: memoryview, message: Extent, number: int) -> Extent:
    values = list(fields(data, message, number))
    if len(values) != 1:
        raise ValueError(f"{len(values)} fields of number {number} where 1 is expected")
    return values[0]


def fields(data: memoryview, message: Extent, wanted: int) -> Iterator[Extent]:
    """The values of a message's fields of one number."""
    place, end = message
    while place < end:
        key, place = varint(data, place, end)
        start = place
        match key & 7:
            case 0:
                after = varint(data, place, end)[1]
            case 2:
                length, start = varint(data, place, end)
                after = start + length
            case 1 | 5 as kind:
                after = place + (8 if kind == 1 else 4)
            case kind:
                raise ValueError(f"wire type {kind}")
        if after > end:
            raise ValueError(f"a field ends {after - end} bytes after its message")
        if key >> 3 == wanted:
            yield start, after
        place = after


def varint(data: memoryview, place: int, end: int) -> tuple[int, int]:
    """The number at `place` and the place after it: seven bits a byte, the lowest first; the eighth: more follow."""
    value = 0
    for shift, at in zip(range(0, 70, 7), range(place, end), strict=False):
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
    raise ValueError(f"no number ends between bytes {place} and {min(end, place + 10)}")


def _delimited(number: int, content: bytes) -> bytes:
    """A field with a length: wire type 2."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """What `varint` reads."""
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
