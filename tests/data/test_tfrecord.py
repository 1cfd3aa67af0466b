"""TFRecord files and the Examples in them, against what their formats say."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ddlbench.data.tfrecord import decode, encode, index_of, index_text, masked_crc, record, walk
from ddlbench.errors import UserError
from tests.support import packs
from tests.support.libraries import needs_dali
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


def seen(path):
    """Payloads by offset, and what is wrong in their place."""
    return {offset: result for offset, _, result in walk(path)}


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


def test_index_is_that_of_tfrecord2idx(file):
    """DALI's script: for each record its offset and its size, frame and all, on a line."""
    text = index_text(SPANS)
    assert text == b"0 21\n21 16\n37 76816\n"
    file.with_suffix(".idx").write_bytes(text)
    assert index_of(file) == SPANS


@needs_dali
def test_index_is_that_of_dalis_own_script(file, tmp_path):
    script = Path(sys.executable).with_name("tfrecord2idx")
    subprocess.run(
        [sys.executable, script, file, tmp_path / "theirs"], check=True, capture_output=True, timeout=WITHIN_S
    )
    assert index_text(SPANS) == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("text", [b"0 21\n21\n", b"0 21 3\n", b"0 x\n"])
def test_what_is_no_index(file, text):
    file.with_suffix(".idx").write_bytes(text)
    with pytest.raises(UserError, match=r"is not an index \((line [12] is not two numbers|invalid literal)"):
        index_of(file)


@pytest.mark.parametrize(
    ("bytes_left", "what"), [(100, "76753 of its 76816 bytes"), (40, "after 3 bytes of its header")]
)
def test_file_that_was_cut_short(file, bytes_left, what):
    """Of flipped bits: test_verify.py."""
    file.write_bytes(file.read_bytes()[:bytes_left])
    assert what in seen(file)[37]


def test_bytes_of_an_example():
    """As protobuf writes Example {features {feature {key: "image/class/label" value: int64 300}} ...}."""
    label = b"\x0a\x11image/class/label" + b"\x12\x06" + b"\x1a\x04" + b"\x0a\x02\xac\x02"
    image = b"\x0a\x0dimage/encoded" + b"\x12\x06" + b"\x0a\x04" + b"\x0a\x02xy"
    name = b"\x0a\x0eimage/filename" + b"\x12\x05" + b"\x0a\x03" + b"\x0a\x01n"
    features = b"".join(b"\x0a" + bytes([len(part)]) + part for part in (label, image, name))
    assert encode(300, b"xy", b"n") == packs.example(b"xy", 300, "n") == b"\x0a" + bytes([len(features)]) + features


@pytest.mark.parametrize("label", [0, 127, 128, 2**31, 2**63 - 1])
@pytest.mark.parametrize("size", [0, 1, 300, 128_000])
def test_examples_come_back(label, size):
    image = bytes(range(256)) * (size // 256) + b"image"
    written = encode(label, image, "é".encode())
    data = memoryview(b"--" + written + b"--")
    read, name, (start, end) = decode(data, 2, 2 + len(written))
    assert (read, name, bytes(data[start:end])) == (label, "é".encode(), image)
    for cut in (3, 40, len(written) - 1):
        with pytest.raises(ValueError, match=r"it has no image/|its features end at its byte"):
            decode(data, 2, 2 + cut)


@pytest.mark.parametrize("payload", [b"", b"\x0a\x05ab", b"\xff" * 90, encode(1, b"", b"") + b"more"])
def test_what_is_no_example_of_an_image(payload):
    with pytest.raises(ValueError, match=r"it has no image/class/label at its byte 0|its features end at its byte"):
        decode(memoryview(payload), 0, len(payload))
