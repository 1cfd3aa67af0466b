"""Damage of every kind to a packed set is found and named; see data/tools/verify.py."""

from __future__ import annotations

import json
import shutil

import pytest

from ddlbench.data.tfrecord.packed import ENCODED, FILENAME, LABEL
from ddlbench.data.tfrecord.records import (
    FRAME,
    bytes_of,
    encode,
    features,
    index_text,
    number_of,
    read_index,
    record,
    walk,
)
from ddlbench.data.tools.pack import pack
from ddlbench.data.tools.verify import verify_pack
from tests.support.pictures import write_folders

SHARD, INDEX = "train/00000-of-00001.tfrecord", "train/00000-of-00001.idx"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two classes of two training images and one validation image."""
    folder = tmp_path_factory.mktemp("verify")
    pack(write_folders(folder / "images", train=2, val=1, classes=2).layout(), folder / "set", 10**6, processes=1)
    return folder / "set"


@pytest.fixture
def packed(made, tmp_path):
    """A packed set to damage."""
    return shutil.copytree(made, tmp_path / "set")


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Starting processes takes longer than the work."""
    monkeypatch.setattr("ddlbench.data.tools.verify.in_processes", lambda work, jobs, _: map(work, jobs))


def verify(folder):
    """Faults, and how many samples were seen."""
    parts = list(verify_pack(folder, processes=1))
    return [fault for result in parts for fault in result.faults], sum(result.counts.total() for result in parts)


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_whole_set(packed):
    assert verify(packed) == ([], 6)


@pytest.mark.parametrize(
    ("within", "what"),
    [
        (0, "its length ("),
        (8, "its length ("),
        (200, "its payload does not match its checksum"),
        (-1, "its payload does not match its checksum"),
    ],
)
def test_flipped_bit_is_found_and_named(packed, within, what):
    offset, size = read_index((packed / INDEX).read_bytes())[2]
    flip(packed / SHARD, offset + within % size)
    faults, samples = verify(packed)
    assert faults[0].startswith(f"{packed / SHARD}, offset {offset}: {what}")
    assert (len(faults), samples) == (1, 5)  # the others are looked at all the same
    (packed / INDEX).unlink()
    faults, _ = verify(packed)
    assert f"index {packed / INDEX} cannot be read (No such file or directory)" in faults
    if what.startswith("its length"):
        left = (packed / SHARD).stat().st_size - offset
        assert faults[0].endswith(f"does not match its checksum; the last {left} bytes of the file cannot be checked")


def rewrite(packed, change):
    """The first shard with its first Example changed, and an index that fits."""
    payloads = [payload for _, payload in walk(packed / SHARD) if isinstance(payload, bytes)]
    data = memoryview(payloads[0])
    result = features(data, (0, len(data)))
    whole = {name: payloads[0][slice(*bytes_of(data, result, name))] for name in (ENCODED, FILENAME)}
    payloads[0] = encode(whole | {LABEL: number_of(data, result, LABEL)} | change)
    (packed / SHARD).write_bytes(b"".join(map(record, payloads)))
    spans = [(offset, len(payload) + FRAME) for offset, payload in walk(packed / SHARD) if isinstance(payload, bytes)]
    (packed / INDEX).write_bytes(index_text(spans))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({LABEL: 2}, "b/000.JPEG has label 2, there are 2 classes"),
        ({LABEL: 0}, "b/000.JPEG has the label of class a"),
        ({LABEL: b"1"}, "not an image's tf.train.Example (image/class/label is not one value of type int)"),
        ({ENCODED: b"no image"}, "b/000.JPEG cannot be decoded (UnidentifiedImageError: cannot identify image file)"),
        ({FILENAME: b"a/x.JPEG"}, "a/x.JPEG has the label of class b"),
    ],
)
def test_record_that_is_right_but_for_its_content(packed, change, what):
    rewrite(packed, change)
    faults, _ = verify(packed)
    assert faults[0].startswith(f"{packed / SHARD}, offset 0: {what}")
    assert f"{packed / SHARD}: " in faults[1]  # it is not the shard of pack.json either


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (
            lambda good: good[: good.index(b"\n") + 1],
            "is stale: 1 records, the shard has 4; they differ from line 2",
        ),
        (
            lambda good: good.replace(b"0 ", b"1 ", 1),
            "is stale: 4 records, the shard has 4; they differ from line 1",
        ),
        (lambda good: good.replace(b" ", b"  "), "differs in form from what tfrecord2idx writes"),
        (lambda good: b"no index", "is not an index (invalid literal"),
    ],
)
def test_stale_index_is_found(packed, spoil, what):
    (packed / INDEX).write_bytes(spoil((packed / INDEX).read_bytes()))
    faults, samples = verify(packed)
    assert f"{packed / INDEX} {what}" in faults[0]
    assert (len(faults), samples) == (1, 6)


def test_shards_that_are_missing_cut_swapped_or_strange(packed):
    shard, offset = packed / SHARD, read_index((packed / INDEX).read_bytes())[3][0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    faults, _ = verify(packed)
    assert faults[0].startswith(f"{shard}, offset {offset}: cut short, 5 of its ")
    assert faults[1] == f"{shard}: 4 records, {len(whole) - 5} bytes; pack.json says 4 and {len(whole)}"
    shard.write_bytes(whole)
    content = json.loads((packed / "pack.json").read_text())
    content["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    (packed / "pack.json").write_text(json.dumps(content))
    assert verify(packed)[0][0] == f"{shard}: its sha256 differs from the one in pack.json: it is another shard"
    shard.rename(packed / "train/00001-of-00001.tfrecord")
    faults, _ = verify(packed)
    assert faults[0] == f"{packed}/train/00001-of-00001.tfrecord: not in the list of pack.json"
    assert faults[1] == f"{shard}: cannot be read (No such file or directory)"
