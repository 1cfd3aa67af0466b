"""tf.train.Example in its bytes, as far as image sets use it: features that are bytes or whole numbers.

    Example   { Features features = 1 }
    Features  { map<string, Feature> feature = 1 }         an entry: key = 1, value = 2
    Feature   { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3 } }
    BytesList { repeated bytes value = 1 }                 Int64List { repeated int64 value = 1 [packed] }

(tensorflow/core/example/feature.proto). In protobuf's encoding a field is a key, number * 8 + wire type, and a value:
a varint (type 0), 8 or 4 bytes (1, 5), or a length and so many bytes (2).
All that reads raises ValueError for bytes that are nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
BYTES_LIST, INT64_LIST = 1, 3

Feature = list[bytes] | list[int]
Extent = tuple[int, int]  # where something begins and ends


def encode(features: Mapping[str, bytes | int]) -> bytes:
    """Features of one value each, by name. Numbers must not be negative."""
    entries = chain.from_iterable(_entry(name, features[name]) for name in sorted(features))
    return b"".join(_delimited(1, list(entries)))


def decode(payload: bytes) -> dict[str, Feature]:
    """All features; one of floats has no values."""
    data = memoryview(payload)
    return {name: _values(data, feature) for name, feature in features(data, (0, len(data))).items()}


def features(data: memoryview, example: Extent) -> dict[str, Extent]:
    """Name of each feature -> where its Feature lies."""
    entries = fields(data, one(data, example, 1), 1)
    return {bytes(data[slice(*one(data, entry, 1))]).decode(): one(data, entry, 2) for entry in entries}


def bytes_of(data: memoryview, feature: Extent) -> Extent:
    return one(data, one(data, feature, BYTES_LIST), 1)


def number_of(data: memoryview, feature: Extent) -> int:
    """Packed or not, the number is where the field begins."""
    return varint(data, *one(data, one(data, feature, INT64_LIST), 1))[0]


def one(data: memoryview, message: Extent, number: int) -> Extent:
    found = list(fields(data, message, number))
    if len(found) != 1:
        raise ValueError(f"{len(found)} fields of number {number} where 1 is expected")
    return found[0]


def fields(data: memoryview, message: Extent, wanted: int) -> Iterator[Extent]:
    """The values of a message's fields of one number."""
    place, end = message
    while place < end:
        key, place = varint(data, place, end)
        after = _after(data, place, end, key & 7)
        start = varint(data, place, end)[1] if key & 7 == DELIMITED else place
        if after > end:
            raise ValueError(f"a field ends {after - end} bytes behind its message")
        if key >> 3 == wanted:
            yield start, after
        place = after


def _after(data: memoryview, place: int, end: int, kind: int) -> int:
    if kind in (VARINT, DELIMITED):
        value, behind = varint(data, place, end)
        return behind if kind == VARINT else behind + value
    if kind not in (FIXED64, FIXED32):
        raise ValueError(f"wire type {kind}")
    return place + (8 if kind == FIXED64 else 4)


def varint(data: memoryview, place: int, end: int) -> tuple[int, int]:
    """The number at `place` and the place behind it: seven bits a byte, the lowest first; the eighth: more follow."""
    value = 0
    for shift, at in zip(range(0, 70, 7), range(place, end), strict=False):
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
    raise ValueError(f"no number ends between bytes {place} and {min(end, place + 10)}")


def _values(data: memoryview, feature: Extent) -> Feature:
    lists = list(fields(data, feature, BYTES_LIST))
    if lists:
        return [bytes(data[slice(*value)]) for each in lists for value in fields(data, each, 1)]
    return [number for each in fields(data, feature, INT64_LIST) for number in _numbers(data, each)]


def _numbers(data: memoryview, values: Extent) -> Iterator[int]:
    """Both encodings of repeated numbers: packed into one field, or a field each."""
    for place, end in fields(data, values, 1):
        while place < end:
            value, place = varint(data, place, end)
            yield value


def _entry(name: str, value: bytes | int) -> list[bytes]:
    if isinstance(value, bytes):
        feature = _delimited(BYTES_LIST, _delimited(1, [value]))
    else:
        feature = _delimited(INT64_LIST, _delimited(1, [_varint(value)]))
    return _delimited(1, [*_delimited(1, [name.encode()]), *_delimited(2, feature)])


def _delimited(number: int, content: list[bytes]) -> list[bytes]:
    """In pieces, as `content` is: joined at every level, an image would be copied six times."""
    return [_varint(number << 3 | DELIMITED), _varint(sum(map(len, content))), *content]


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth bit says that more follow."""
    assert value >= 0, value
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
