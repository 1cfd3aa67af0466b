"""Packed image sets: the files of the folders byte for byte; a set is complete or does not exist."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import pytest

from ddlbench.data.images.index import prepare_index
from ddlbench.data.tfrecord import UNFINISHED, open_pack, order, read_manifest, walk
from ddlbench.data.tools import make_shard, pack
from ddlbench.errors import UserError
from ddlbench.files import unfinished_path
from tests.support.disk import largest_file
from tests.support.killed import ended_process
from tests.support.libraries import needs_dali
from tests.support.packs import image_of, pack_here
from tests.support.pictures import write_folders

SHARD_BYTES = 4_500  # four or five images of about 980 bytes: four training shards, two of validation


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    """Three classes of five training and two validation images."""
    folders = write_folders(tmp_path_factory.mktemp("folders"), train=5, val=2).layout()
    (folders.root / "train/a/000.JPEG").rename(folders.root / "train/a/é 0.JPEG")
    return folders


@pytest.fixture(scope="module")
def packed(layout, tmp_path_factory):
    return pack_here(layout, tmp_path_factory.mktemp("packed") / "set", SHARD_BYTES)


def images(folder, split):
    shards = read_manifest(folder).splits[split].shards
    return [
        image_of(payload) for shard in shards for *_, payload in walk(folder / shard.file) if isinstance(payload, bytes)
    ]


def written(folder):
    """When each shard was."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.glob("*/*.tfrecord")}


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_file_is_there_byte_for_byte(layout, packed):
    for split, files in prepare_index(layout, None).splits.items():
        result = images(packed, split)
        folder = layout.root / split
        assert {image.filename for image in result} == {f"{p.parent.name}/{p.name}" for p in folder.glob("*/*")}
        assert len(result) == len(files)
        for image, i in zip(result, order(split, len(files)), strict=True):
            assert image.filename == f"{'abc'[image.label]}/{files.name(i)}"
            assert image.encoded == (folder / image.filename).read_bytes()


def test_training_images_have_a_pinned_random_order(packed):
    assert order("train", 6).tolist() == [5, 2, 1, 3, 0, 4]
    assert [image.label for image in images(packed, "val")] == [0, 0, 1, 1, 2, 2]
    assert [image.label for image in images(packed, "train")] != sorted([0, 1, 2] * 5)


def test_manifest(layout, packed):
    about = json.loads((packed / "pack.json").read_text())
    assert about["format"] == 1
    assert about["classes"] == ["a", "b", "c"]
    assert about["hash"] == prepare_index(layout, None).hash
    assert [about["splits"][split]["samples"] for split in ("train", "val")] == [15, 6]
    for split, parts in about["splits"].items():
        assert len(parts["shards"]) > 1
        for number, shard in enumerate(parts["shards"]):
            assert shard["file"] == f"{split}/{number:05d}-of-{len(parts['shards']):05d}.tfrecord"
            stored = (packed / shard["file"]).read_bytes()
            assert (len(stored), hashlib.sha256(stored).hexdigest()) == (shard["bytes"], shard["sha256"])
        assert sum(shard["samples"] for shard in parts["shards"]) == parts["samples"]
    assert open_pack(packed) == read_manifest(packed)
    files = {"pack.json"} | {shard.file for shard in open_pack(packed).shards}
    assert set(content(packed)) == files | {file.replace(".tfrecord", ".idx") for file in files - {"pack.json"}}


def test_processes_and_attempts_change_no_byte(layout, packed, tmp_path, capfd):
    pack(layout, tmp_path / "two", SHARD_BYTES, processes=2)
    assert content(tmp_path / "two") == content(packed)
    said = capfd.readouterr().err
    assert f"packing 6 shards into {tmp_path / 'two'}, 2 at a time\n" in said


def test_interrupted_pack_is_resumed(layout, packed, tmp_path, in_process, monkeypatch):
    target, whole = tmp_path / "set", make_shard

    def interrupted(target, file, *job):
        if file.startswith("val/00001"):
            raise KeyboardInterrupt
        return whole(target, file, *job)

    target.mkdir()
    (other := unfinished_path(target / UNFINISHED, target)).touch()  # another process has begun to pack the same
    monkeypatch.setattr("ddlbench.data.tools.make_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(layout, target, SHARD_BYTES, processes=1)
    with pytest.raises(UserError, match=r"pack.json cannot be read .* was not packed completely: pack it again"):
        open_pack(target)
    with pytest.raises(UserError, match=r"holds these images in other shards"):
        pack(layout, target, 10**6, processes=1)
    (shard := target / "train/00001-of-00004.tfrecord").write_bytes(shard.read_bytes()[:-1])
    left = unfinished_path(shard, shard.parent).name.replace(f"~{os.getpid()}~", f"~{ended_process().pid}~")
    shard.with_name(left).write_text("half a shard")
    (target / "train/00002-of-00004.idx").unlink()
    before = written(target)

    def twice(*job):
        (target / UNFINISHED).unlink(missing_ok=True)  # the other process is faster
        other.unlink(missing_ok=True)
        return whole(*job)

    monkeypatch.setattr("ddlbench.data.tools.make_shard", twice)
    pack(layout, target, SHARD_BYTES, processes=1)
    after = written(target)
    assert sorted((name for name in after if after[name] != before.get(name)), key=lambda name: after[name]) == [
        "train/00001-of-00004.tfrecord", "train/00002-of-00004.tfrecord", "val/00001-of-00002.tfrecord",
    ]  # fmt: skip
    assert content(target) == content(packed)


def test_packing_again_repairs_what_is_damaged(layout, packed, tmp_path, in_process):
    target = tmp_path / "set"
    pack(layout, target, SHARD_BYTES, processes=1)
    (target / "val/00000-of-00002.tfrecord").write_bytes(b"damaged")
    (target / "train/00000-of-00004.idx").write_text("0 5\n")
    first, second = (target / f"train/0000{number}-of-00004.tfrecord" for number in (1, 2))
    second.write_bytes(first.read_bytes())  # of which every checksum is right
    pack(layout, target, SHARD_BYTES, processes=1)
    assert content(target) == content(packed)


def test_target_of_something_else_is_refused(layout, packed, tmp_path):
    before = content(packed)
    with pytest.raises(UserError, match=r"holds these images in other shards .*'train': 4.*'train': 1.*another folder"):
        pack(layout, packed, 10**6, processes=1)
    other = write_folders(tmp_path / "other", train=1, val=1).layout()
    with pytest.raises(UserError, match=r"holds a packed set of other images"):
        pack(other, packed, SHARD_BYTES, processes=1)
    assert content(packed) == before
    with pytest.raises(UserError, match=r"other holds other files: give an empty or a new folder"):
        pack(layout, tmp_path / "other", SHARD_BYTES, processes=1)


def test_file_that_changes_or_vanishes_is_named(tmp_path, in_process):
    layout = write_folders(tmp_path / "set", train=1, val=1).layout()
    (file := layout.root / "val/b/000.JPEG").write_bytes(b"longer" + file.read_bytes())
    pack(layout, tmp_path / "first", SHARD_BYTES, processes=1)  # its size when the folders are listed is what counts
    file.write_bytes(b"short")
    with pytest.raises(UserError, match=r"val/b/000.JPEG has 5 bytes, \d+ when the folders were indexed: delete"):
        pack(layout, tmp_path / "second", SHARD_BYTES, processes=1)
    with pytest.raises(UserError, match=r"cannot read .*gone.JPEG \(No such file or directory\): restore or remove it"):
        make_shard(tmp_path, "x.tfrecord", layout.root, [("gone.JPEG", 0, 1)])
    assert not list(tmp_path.glob("*x.tfrecord*"))


def test_full_disk_leaves_nothing_that_looks_whole(layout, packed, tmp_path, in_process):
    target = tmp_path / "set"
    with largest_file(3_000), pytest.raises(UserError, match=r"tfrecord \(File too large\): free space .* again"):
        pack(layout, target, SHARD_BYTES, processes=1)
    assert [name for name in content(target) if name != "pack.unfinished.jsonl"] == []
    pack(layout, target, SHARD_BYTES, processes=1)
    assert content(target) == content(packed)


def test_target_that_cannot_be_made(layout, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/set.* \(Not a directory\)"):
        pack(layout, tmp_path / "file" / "set", SHARD_BYTES, processes=1)


def test_folders_that_cannot_be_packed_make_no_target(tmp_path):
    layout = write_folders(tmp_path / "set", train=1, val=1).layout()
    (layout.root / "val/d").mkdir()
    with pytest.raises(UserError, match=r"do not hold the same classes \(3 and 4\): only one has d"):
        pack(layout, tmp_path / "packed", SHARD_BYTES, processes=1)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # Packing again cannot repair it: it does not know what is in the folder.
        ("{", r"pack.json is not JSON .* copy it again; else delete .* and pack again"),
        ('{"format": 9}', r"has format 9, this version reads 1: .* else delete"),
        ('{"format": 1}', r"does not describe a packed image set .* else delete"),
        (None, r"pack.json cannot be read .*give the folder of a packed"),
    ],
)
def test_damage_of_pack_json_is_found_on_opening(tmp_path, content, message):
    """That of a shard: images/test_packed.py."""
    if content is not None:
        (tmp_path / "pack.json").write_text(content)
    with pytest.raises(UserError, match=message):
        open_pack(tmp_path)


@needs_dali
def test_dali_reads_it_back(packed):
    from nvidia.dali import fn, pipeline_def, tfrecord

    shards = sorted((packed / "train").glob("*.tfrecord"))

    @pipeline_def(batch_size=15, num_threads=1, device_id=None)  # pyright: ignore[reportArgumentType]
    def reader():
        features = {
            "image/encoded": tfrecord.FixedLenFeature([], tfrecord.string, ""),
            "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
        }
        paths = [str(path) for path in shards]
        indices = [str(path.with_suffix(".idx")) for path in shards]
        read: Any = fn.readers.tfrecord(path=paths, index_path=indices, features=features)
        return read["image/encoded"], read["image/class/label"]

    pipe = reader()
    pipe.build()
    encoded, labels = pipe.run()
    expected = images(packed, "train")
    assert [encoded.at(i).tobytes() for i in range(15)] == [image.encoded for image in expected]
    assert [int(labels.at(i)[0]) for i in range(15)] == [image.label for image in expected]
