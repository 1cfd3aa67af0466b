"""Packed image sets: the samples of the folders they came from, in their order and by both loaders; damaged sets."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from ddlbench.data.images.packed import PackedImages, scan
from ddlbench.data.loaders.dali import Dali
from ddlbench.data.tfrecord import open_pack
from ddlbench.errors import UserError
from tests.support import packs
from tests.support.dali_feeds import dali, native
from tests.support.libraries import needs_dali
from tests.support.pictures import Shape, truncate, write_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("folders"), train=5, val=3)


@pytest.fixture
def packed(folders, tmp_path):
    return PackedImages("packed", root=str(packs.write_pack(folders.layout(), tmp_path / "set")))


def batches(feed):
    return [*feed.train(0), *feed.train(1), *feed.validation()]


def same(ours, theirs):
    for got, expected in zip(batches(ours), batches(theirs), strict=True):
        assert torch.equal(got.inputs, expected.inputs)
        assert torch.equal(got.targets, expected.targets)


def test_the_native_loader_sees_no_difference(folders, packed, tmp_path):
    """In a set written by hand, and in one that the program packed."""
    made = packs.pack_here(folders.layout(), tmp_path / "made", shard_bytes=20_000)
    for data in (packed, replace(packed, root=str(made))):
        data.check(Shape())
        data.prepare()
        assert data.describe() == folders.describe()
        same(native(data), native(folders))


@needs_dali
@pytest.mark.parametrize("fused_crop", [True, False])
def test_dali_sees_no_difference(folders, packed, fused_crop):
    Dali("dali").check(packed, Shape(), torch.device("cpu"))
    same(dali(packed, fused_crop=fused_crop), dali(folders, fused_crop=fused_crop))


def test_the_index_is_kept_and_made_anew_for_other_shards(packed):
    packed.prepare()
    (kept, other) = sorted(Path(packed.root, ".ddlbench").iterdir())
    stamps = {file: file.stat().st_mtime_ns for file in (kept, other)}
    packed.prepare()
    assert {file: file.stat().st_mtime_ns for file in (kept, other)} == stamps
    kept.write_bytes(b"half")
    before = len(packed.split(True, Shape(), 0)), len(packed.split(False, Shape(), 0))
    assert before == (15, 9)
    assert kept.stat().st_size > 4


def test_names_of_any_length_lie_in_order(tmp_path):
    """Where one name begins as another, the shorter comes first; a class comes before every name of the next."""
    folders = write_folders(tmp_path / "odd", train=3, val=1, classes=2)
    names = ("b", "bé", "a" * 90, "b.x")
    for label, name in product("ab", names):
        (tmp_path / "odd/train" / label / f"{name}.JPEG").write_bytes(b"x" * len(name))
    packs.write_pack(folders.layout(), tmp_path / "set", shards=3)
    source, plain = PackedImages("packed", root=str(tmp_path / "set")).source(True), folders.source(True)
    images = range(len(plain.files))
    assert [source.files.name(i) for i in images] == [plain.files.name(i) for i in images]
    assert [bytes(source.content(i)) for i in images] == [plain.content(i) for i in images]
    for key in ("names", "sizes", "labels"):
        assert np.array_equal(getattr(source.files, key), getattr(plain.files, key))


def test_memory_of_a_scan_is_that_of_the_index(tmp_path):
    shards = [tmp_path / f"{number}.tfrecord" for number in range(20)]
    for number, shard in enumerate(shards):
        packs.write_shard(shard, [packs.example(b"an image", 0, f"a/{number}_{i:04d}.JPEG") for i in range(200)])
    tracemalloc.start()
    try:
        result = scan(shards, classes=1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(result) == 4_000
    assert most < 220 * 4_000  # a tuple, a name and numbers of Python for every image are more


def test_a_split_that_is_not_there(packed):
    with pytest.raises(UserError, match=r"data.val_dir=valid is no split of .*/set: choose train or val"):
        replace(packed, val_dir="valid").check(Shape())
    replace(packed, val_dir="train").check(Shape())


def test_a_rank_does_not_look_at_the_shards(packed, monkeypatch):
    """Rank 0 did, and a thousand ranks would read them at once."""
    packed.prepare()
    monkeypatch.setattr("ddlbench.data.images.packed.open_pack", lambda _: pytest.fail("looked at the shards"))
    assert len(packed.split(True, Shape(), 0)) == packed.describe()["train_samples"] == 15


def test_the_sizes_of_shards_are_checked_once(packed, monkeypatch):
    checked = []
    monkeypatch.setattr(
        "ddlbench.data.images.packed.open_pack", lambda folder: checked.append(folder) or open_pack(folder)
    )
    packed.prepare()
    assert checked == [Path(packed.root)]


def test_split_can_be_sent_to_a_worker(packed):
    split = packed.split(True, Shape(), 0)
    split.__getitems__([(0, 0)])
    sent = pickle.dumps(split)
    assert len(sent) < 8_000  # without the shards, which are mapped anew
    assert torch.equal(pickle.loads(sent).__getitems__([(0, 1)]).inputs, split.__getitems__([(0, 1)]).inputs)


@needs_dali
def test_a_bad_image_is_named_with_its_place(tmp_path):
    layout = write_folders(tmp_path / "bad", train=5, val=3).layout()
    truncate(layout.root / "train/b/003.JPEG")
    root = str(packs.write_pack(layout, tmp_path / "packed"))
    data = PackedImages("packed", root=root, crop_scale=[1.0, 1.0], crop_ratio=[1.2, 1.2])  # 48 x 40 pixels: all
    for feed in (native(data), dali(data)):
        with pytest.raises(UserError, match=r"train/b/003.JPEG, at byte \d+ of .*.tfrecord, cannot be decoded"):
            list(feed.train(0))
    skipping = native(replace(data, on_bad_sample="skip"))
    list(skipping.train(0))
    assert list(skipping.facts()["bad_samples"]) == ["train/b/003.JPEG"]


def stale_index(shard):
    lines = shard.with_suffix(".idx").read_text().splitlines()
    shard.with_suffix(".idx").write_text("\n".join(lines[:-1]))


def no_example(shard):
    content = shard.read_bytes()
    shard.write_bytes(content[:12] + b"\xff" * (len(content) - 12))


def flip_label(shard):
    """The first label, a packed list of one varint, from 0, 1 or 2 to 64 and more."""
    content = shard.read_bytes()
    place = content.index(b"image/class/label") + len(b"image/class/label") + 6
    shard.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            partial(packs.flip, place=0),
            r"00001-of-00002.tfrecord holds no image at byte 0 \(its length is \d+, \d+ by the index\)",
        ),
        (flip_label, r"00001-of-00002.tfrecord holds no image at byte 0 \(its label is 6[456], there are 3 classes\)"),
        (Path.unlink, "00001-of-00002.tfrecord is missing: if the set is a copy, copy it again"),
        (
            lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
            r"00001-of-00002.tfrecord has \d+ bytes, pack.json says \d+",
        ),
        (lambda shard: shard.with_suffix(".idx").unlink(), "index .*00001-of-00002.idx cannot be read"),
        (stale_index, r"the indices of train have 14 images, pack.json 15"),
        (lambda shard: shard.with_suffix(".idx").write_text("<html>"), "00001-of-00002.idx is not an index"),
        (no_example, r"00001-of-00002.tfrecord holds no image at byte 0 \("),
    ],
)
def test_damage_is_refused_before_training(packed, spoil, message):
    spoil(Path(packed.root, "train/00001-of-00002.tfrecord"))
    with pytest.raises(UserError, match=message) as error:
        packed.prepare()
    assert "\n" not in str(error.value)


def test_a_root_is_needed():
    """Folders that hold no packed set: test_pack.py."""
    with pytest.raises(UserError, match=r"data=imagenet_tfrecord needs data.root=\.\.\.: the folder of a packed"):
        PackedImages("imagenet_tfrecord").check(Shape())
