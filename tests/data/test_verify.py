"""Damage of every kind to a packed set is found and named; see data/tools.py."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from ddlbench.data.tfrecord import encode, index_of, index_text, record, walk
from ddlbench.data.tools import verify_pack
from tests.support.packs import flip

pytestmark = pytest.mark.usefixtures("in_process")
SHARD, INDEX = "train/00000-of-00001.tfrecord", "train/00000-of-00001.idx"


def verify(folder):
    """Faults, and how many samples were seen."""
    parts = list(verify_pack(folder, processes=1))
    return [fault for result in parts for fault in result.faults], sum(result.counts.total() for result in parts)


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
    offset, size = index_of(packed / SHARD)[2]
    flip(packed / SHARD, offset + within % size)
    faults, samples = verify(packed)
    assert faults[0].startswith(f"{packed / SHARD}, offset {offset}: {what}")
    length = what.startswith("its length")
    assert (len(faults), samples) == (1, 4 if length else 5)  # what follows a payload is looked at all the same
    left = (packed / SHARD).stat().st_size - offset
    assert not length or faults[0].endswith(f"; the last {left} bytes of the file cannot be checked")
    (packed / INDEX).unlink()
    faults, _ = verify(packed)
    assert faults[1].startswith(f"index {packed / INDEX} cannot be read (No such file or directory): if the set is a")


def rewrite(packed, first):
    """The first shard with another first record, and an index that fits."""
    _, *others = [payload for *_, payload in walk(packed / SHARD) if isinstance(payload, bytes)]
    (packed / SHARD).write_bytes(b"".join(map(record, [first, *others])))
    spans = [(offset, end - offset) for offset, end, _ in walk(packed / SHARD) if end]
    (packed / INDEX).write_bytes(index_text(spans))


@pytest.mark.parametrize(
    ("first", "what"),
    [
        ((2, None, b"b/000.JPEG"), "b/000.JPEG has label 2, there are 2 classes"),
        ((0, None, b"b/000.JPEG"), "b/000.JPEG has the label of class a"),
        ((1, b"no image", b"b/000.JPEG"), "b/000.JPEG cannot be decoded (UnidentifiedImageError: cannot identify"),
        ((1, None, b"a/x.JPEG"), "a/x.JPEG has the label of class b"),
        (b"other", "not an image's tf.train.Example (it has no image/class/label at its byte 0)"),
    ],
)
def test_record_that_is_right_but_for_its_content(packed, first, what):
    if isinstance(first, tuple):
        label, content, name = first
        image = packed.parent / "image.jpg"
        Image.new("RGB", (8, 8)).save(image)
        first = encode(label, content or image.read_bytes(), name)
    rewrite(packed, first)
    faults, _ = verify(packed)
    assert faults[0].startswith(f"{packed / SHARD}, offset 0: {what}")
    assert f"{packed / SHARD}: " in faults[1]  # it is not the shard of pack.json either


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda good: good[: good.index(b"\n") + 1], "is stale: it has 1 records, the shard 4, or others"),
        (lambda good: good.replace(b"0 ", b"1 ", 1), "is stale: it has 4 records, the shard 4, or others"),
        (lambda good: good.replace(b" ", b"  "), "differs in form from what tfrecord2idx writes"),
    ],
)
def test_stale_index_is_found(packed, spoil, what):
    (packed / INDEX).write_bytes(spoil((packed / INDEX).read_bytes()))
    faults, samples = verify(packed)
    assert f"{packed / INDEX} {what}" in faults[0]
    assert (len(faults), samples) == (1, 6)


def test_shards_that_are_missing_cut_swapped_or_strange(packed):
    shard, offset = packed / SHARD, index_of(packed / SHARD)[3][0]
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
    other = shard.rename(packed / "train/00001-of-00001.tfrecord")
    strange = [packed / f"train/{number}.tfrecord" for number in range(8)]
    for path in strange:
        path.touch()
    faults, _ = verify(packed)
    assert faults[:9] == [f"{path}: not in the list of pack.json" for path in sorted([other, *strange])]
    assert faults[9] == f"{shard}: cannot be read (No such file or directory)"
