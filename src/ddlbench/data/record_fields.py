"""Where the features of a tf.train.Example lie in its bytes, so that an image can be used where it is.

    Example   { Features features = 1 }
    Features  { map<string, Feature> feature = 1 }         an entry: key = 1, value = 2
    Feature   { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3 } }
    BytesList { repeated bytes value = 1 }                 Int64List { repeated int64 value = 1 [packed] }

(tensorflow/core/example/feature.proto). In protobuf's encoding a field is a key, number * 8 + wire type, and a value:
a varint (type 0), 8 or 4 bytes (1, 5), or a length and so many bytes (2). All functions raise ValueError for bytes that
are nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
BYTES_LIST, INT64_LIST = 1, 3

Span = tuple[int, int]  # where something begins and ends


def features(data: memoryview, example: Span) -> dict[str, Span]:
    """Name of each feature -> where its Feature lies."""
    entries = fields(data, one(data, example, 1), 1)
    return {bytes(data[slice(*one(data, entry, 1))]).decode(): one(data, entry, 2) for entry in entries}


def bytes_of(data: memoryview, feature: Span) -> Span:
    return one(data, one(data, feature, BYTES_LIST), 1)


def number_of(data: memoryview, feature: Span) -> int:
    """Packed or not, the number is where the field begins."""
    return varint(data, *one(data, one(data, feature, INT64_LIST), 1))[0]


def one(data: memoryview, message: Span, number: int) -> Span:
    found = list(fields(data, message, number))
    if len(found) != 1:
        raise ValueError(f"{len(found)} fields of number {number} where 1 belongs")
    return found[0]


def fields(data: memoryview, message: Span, wanted: int) -> Iterator[Span]:
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
