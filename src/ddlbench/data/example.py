"""tf.train.Example in its bytes, as far as image sets use it: features that are bytes or whole numbers.

    Example   { Features features = 1 }
    Features  { map<string, Feature> feature = 1 }         an entry: key = 1, value = 2
    Feature   { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3 } }
    BytesList { repeated bytes value = 1 }                 Int64List { repeated int64 value = 1 [packed] }

(tensorflow/core/example/feature.proto). In protobuf's encoding a field is a key, number * 8 + wire type, and a value:
a varint (type 0), 8 or 4 bytes (1, 5), or a length and so many bytes (2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

BYTES_LIST, INT64_LIST = 1, 3
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5

Feature = list[bytes] | list[int]


def encode(features: Mapping[str, bytes | int]) -> bytes:
    """Features of one value each, by name. Numbers must not be negative."""
    return _delimited(1, b"".join(_entry(name, features[name]) for name in sorted(features)))


def decode(payload: bytes) -> dict[str, Feature]:
    """All features; one of floats has no values. Raises ValueError for what is no Example."""
    features: dict[str, Feature] = {}
    for entry in _messages(memoryview(payload), 1):
        for pair in _messages(entry, 1):
            names, values = list(_messages(pair, 1)), list(_messages(pair, 2))
            features[bytes(names[-1]).decode() if names else ""] = _values(values[-1]) if values else []
    return features


def _entry(name: str, value: bytes | int) -> bytes:
    if isinstance(value, bytes):
        feature = _delimited(BYTES_LIST, _delimited(1, value))
    else:
        feature = _delimited(INT64_LIST, _delimited(1, _varint(value)))
    return _delimited(1, _delimited(1, name.encode()) + _delimited(2, feature))


def _delimited(number: int, content: bytes) -> bytes:
    return b"".join((_varint(number << 3 | DELIMITED), _varint(len(content)), content))


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth bit says that more follow."""
    assert value >= 0, value
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _values(feature: memoryview) -> Feature:
    for number, content in _fields(feature):
        if isinstance(content, int) or number not in (BYTES_LIST, INT64_LIST):
            continue
        if number == BYTES_LIST:
            return [bytes(value) for value in _messages(content, 1)]
        return list(_numbers(content))
    return []


def _numbers(values: memoryview) -> Iterator[int]:
    """Both encodings of repeated numbers: packed into one field, or a field each."""
    for _, content in _fields(values):
        if isinstance(content, int):
            yield content
            continue
        place = 0
        while place < len(content):
            value, place = _read_varint(content, place)
            yield value


def _messages(data: memoryview, number: int) -> Iterator[memoryview]:
    for found, content in _fields(data):
        if found == number:
            if isinstance(content, int):
                raise ValueError(f"field {number} is a number")
            yield content


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        kind = key & 7
        if kind == VARINT:
            value, place = _read_varint(data, place)
            yield key >> 3, value
            continue
        if kind == DELIMITED:
            size, place = _read_varint(data, place)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if place + size > len(data):
            raise ValueError(f"a field of {size} bytes in the last {len(data) - place}")
        yield key >> 3, data[place : place + size]
        place += size


def _read_varint(data: memoryview, place: int) -> tuple[int, int]:
    """The number at `place` and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place == len(data):
            raise ValueError("a number is cut short")
        value |= (data[place] & 0x7F) << shift
        place += 1
        if data[place - 1] < 0x80:
            return value, place
    raise ValueError("a number has more than ten bytes")
