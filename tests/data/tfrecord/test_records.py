"""TFRecord files and the Examples in them, against what their formats say."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ddlbench.data.tfrecord.records import (
    BadRecord,
    bytes_of,
    encode,
    features,
    index_text,
    masked_crc,
    number_of,
    read_index,
    record,
    walk,
)
from tests.support.libraries import needs_dali
from tests.support.packs import image_of
from tests.support.waiting import WITHIN_S

PAYLOADS = [b"first", b"", bytes(range(256)) * 300]
SPANS = [(0, 21), (21, 16), (37, 76816)]


def slow_crc32c(content):
    """Castagnoli's polynomial bit by bit."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(content):
    crc = slow_crc32c(content)
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.tfrecord"
    path.write_bytes(b"".join(map(record, PAYLOADS)))
    return path


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def seen(path, spans=()):
    """Payloads by offset, and what is wrong in their place."""
    return {offset: result.what if isinstance(result, BadRecord) else result for offset, result in walk(path, spans)}


def test_frame_of_a_record():
    assert slow_crc32c(b"123456789") == 0xE3069283  # the published check value
    for payload in PAYLOADS:
        length = struct.pack("<Q", len(payload))
        expected = length + struct.pack("<I", masked(length)) + payload + struct.pack("<I", masked(payload))
        assert record(payload) == expected
        assert masked_crc(payload) == masked(payload)


def test_records_come_back(file):
    assert list(seen(file).values()) == PAYLOADS
    assert list(seen(file)) == [offset for offset, _ in SPANS]


def tfrecord2idx(path):
    """DALI's script: for each record its offset and its size, frame and all, on a line."""
    lines, content, place = [], path.read_bytes(), 0
    while place < len(content):
        size = 8 + 4 + int.from_bytes(content[place : place + 8], "little") + 4
        lines.append(f"{place} {size}\n")
        place += size
    return "".join(lines).encode()


def test_index_is_that_of_tfrecord2idx(file):
    text = index_text(SPANS)
    assert text == tfrecord2idx(file) == b"0 21\n21 16\n37 76816\n"
    assert read_index(text) == SPANS


@needs_dali
def test_index_is_that_of_dalis_own_script(file, tmp_path):
    script = Path(sys.executable).with_name("tfrecord2idx")
    subprocess.run(
        [sys.executable, script, file, tmp_path / "theirs"], check=True, capture_output=True, timeout=WITHIN_S
    )
    assert index_text(SPANS) == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("text", [b"0 21\n21\n", b"0 21 3\n", b"0 x\n"])
def test_what_is_no_index(text):
    with pytest.raises(ValueError, match=r"line|invalid literal"):
        read_index(text)


@pytest.mark.parametrize("place", [21, 30])  # in the second record's length, and in that length's checksum
def test_damaged_length_hides_what_follows_unless_an_index_tells(file, place):
    flip(file, place)
    result = seen(file)
    assert result[0] == b"first"
    assert list(result) == [0, 21]
    assert "its length" in result[21]
    assert "does not match its checksum" in result[21]
    assert seen(file, SPANS) == result | {37: PAYLOADS[2]}


@pytest.mark.parametrize("place", [13, 18])  # in the first record's payload, and in its checksum
def test_damaged_payload_is_one_bad_record(file, place):
    flip(file, place)
    result = seen(file)
    assert result[0] == "its payload does not match its checksum"
    assert list(result.values())[1:] == PAYLOADS[1:]


@pytest.mark.parametrize(
    ("bytes_left", "what"), [(100, "76753 of its 76816 bytes"), (40, "after 3 bytes of its header")]
)
def test_file_that_was_cut_short(file, bytes_left, what):
    file.write_bytes(file.read_bytes()[:bytes_left])
    assert what in seen(file)[37]


def decoded(example, *numbers):
    """The one value of each feature, of these as a number."""
    data = memoryview(example)
    result = features(data, (0, len(data)))
    return {
        name: number_of(data, result, name) if name in numbers else example[slice(*bytes_of(data, result, name))]
        for name in result
    }


def test_bytes_of_an_example():
    """As protobuf writes Example {features {feature {a: bytes xy} feature {n: int64 300}}}."""
    a = b"\x0a\x01a" + b"\x12\x06" + b"\x0a\x04" + b"\x0a\x02xy"
    n = b"\x0a\x01n" + b"\x12\x06" + b"\x1a\x04" + b"\x0a\x02\xac\x02"
    expected = b"\x0a\x1a" + b"\x0a\x0b" + a + b"\x0a\x0b" + n
    assert encode({"n": 300, "a": b"xy"}) == expected
    assert decoded(expected, "n") == {"a": b"xy", "n": 300}


def test_examples_come_back():
    values = {"image/encoded": bytes(range(256)) * 500, "image/class/label": 0, "image/filename": "é".encode()}
    assert decoded(encode(values), "image/class/label") == values
    for number in (127, 128, 2**31, 2**63 - 1):
        assert decoded(encode({"n": number}), "n") == {"n": number}


def test_examples_of_other_writers():
    one = b"\x0a\x01n" + b"\x12\x04" + b"\x1a\x02" + b"\x08\x05"  # a field each: not packed
    two = b"\x0a\x01m" + b"\x12\x06" + b"\x1a\x04" + b"\x08\x05\x08\x06"
    packed = b"\x0a\x01p" + b"\x12\x06" + b"\x1a\x04" + b"\x0a\x02\x05\x06"
    floats = b"\x0a\x01f" + b"\x12\x08" + b"\x12\x06" + b"\x0a\x04\0\0\0\0"
    unknown = b"\x3d\0\0\0\0" + b"\x21" + bytes(8)  # field 7 of 4 bytes, field 4 of 8
    body = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in (one, two, packed, floats))
    data = memoryview(b"\x0a" + bytes([len(body)]) + body + unknown)
    result = features(data, (0, len(data)))
    assert list(result) == ["n", "m", "p", "f"]
    assert number_of(data, result, "n") == 5
    for name in ("m", "p", "f"):
        with pytest.raises(ValueError, match=f"{name} is not one value of type int"):
            number_of(data, result, name)


@pytest.mark.parametrize("payload", [b"\x0a", b"\x0a\x05ab", b"\x0b", b"\x0a" + b"\xff" * 11, b"\x08\x01", b"\x0d\0"])
def test_what_is_no_example(payload):
    with pytest.raises(ValueError, match=r"cut short|bytes|wire type|is a number"):
        features(memoryview(payload), (0, len(payload)))


@pytest.mark.parametrize(
    ("features", "what"),
    [
        ({"image/encoded": b"", "image/filename": b"a"}, "it has no image/class/label"),
        ({"image/encoded": 3, "image/class/label": 1, "image/filename": b""}, "image/encoded is not one value of"),
        (
            {"image/encoded": b"", "image/class/label": b"1", "image/filename": b""},
            "not one value of type int",
        ),
    ],
)
def test_an_example_that_is_no_image(features, what):
    with pytest.raises(ValueError, match=what):
        image_of(encode(features))
