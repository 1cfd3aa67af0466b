"""python -m ddlbench.data as a user meets it; damage of every kind is found and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from ddlbench.data.__main__ import main
from ddlbench.data.example import decode, encode
from ddlbench.data.pack import pack
from ddlbench.data.packed import ENCODED, FILENAME, LABEL
from ddlbench.data.tfrecord import index_text, record, spans_of, walk
from tests.pictures import truncate, write_folders

SHARD, INDEX = "train/00000-of-00001.tfrecord", "train/00000-of-00001.idx"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two classes of two training images and one validation image."""
    return write_folders(tmp_path_factory.mktemp("folders"), train=2, val=1, classes=2).layout()


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "set"
    pack(folders, target, 10**6, processes=1)
    return target


@pytest.fixture
def packed(made, tmp_path):
    """A packed set to damage."""
    return shutil.copytree(made, tmp_path / "set")


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Starting processes takes longer than the work."""
    for module in ("pack", "verify"):
        monkeypatch.setattr(f"ddlbench.data.{module}.in_processes", lambda work, jobs, _: map(work, jobs))


@pytest.fixture
def data(capsys):
    """Runs the program; exit code, and the lines of what it printed and of what it said."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_from_folders_to_a_checked_set(data, folders, tmp_path):
    target = tmp_path / "packed"
    code, out, err = data("pack", folders.root, target, "--shard-mb", 1, "--processes", 1)
    assert (code, err) == (0, [f"packing 2 shards into {target}, 1 at a time"])
    assert len(out) == 1
    assert out[0].startswith(f"{target}: 4 train images in 1, 2 val images in 1 shards, 0.0 MB")
    for place in (target, folders.root):
        code, out, err = data("verify", place)
        assert (code, err) == (0, [])
        assert [line.split() for line in out[:-1]] == [
            ["train", "a", "2"], ["train", "b", "2"], ["val", "a", "1"], ["val", "b", "1"],
        ]  # fmt: skip
        assert out[-1] == f"{place}: whole, 6 samples"


def test_info_of_folders_and_their_pack(data, folders, made):
    code, out, _ = data("info", made)
    packed = dict(line.split(None, 1) for line in out)
    assert code == 0
    assert packed["kind"] == "packed image set, format 1"
    assert packed["classes"] == "2: a, b"
    assert packed["train"].startswith("4 images in 1 shards, ")
    _, out, _ = data("info", folders.root)
    plain = dict(line.split(None, 1) for line in out)
    assert plain["kind"] == "image folders"
    size = sum(path.stat().st_size for path in folders.splits[0].glob("*/*"))
    assert plain["train"] == f"4 images, {size} bytes (0.0 MB)"
    assert plain["hash"] == packed["hash"]


@pytest.mark.parametrize(
    ("within", "what"),
    [
        (0, "its length ("),
        (8, "its length ("),
        (200, "its payload does not have its checksum"),
        (-1, "its payload does not have its checksum"),
    ],
)
def test_flipped_bit_is_found_and_named(data, packed, within, what):
    offset, size = spans_of(packed / SHARD)[2]
    flip(packed / SHARD, offset + within % size)
    code, out, _ = data("verify", packed)
    assert code == 1
    assert out[0].startswith(f"{packed / SHARD}, offset {offset}: {what}")
    assert out[-1] == f"{packed}: 1 fault, 5 samples"  # the others are looked at all the same
    (packed / INDEX).unlink()
    code, out, _ = data("verify", packed)
    assert f"index {packed / INDEX} cannot be read (No such file or directory)" in out
    if what.startswith("its length"):
        left = (packed / SHARD).stat().st_size - offset
        assert out[0].endswith(f"does not have its checksum; the last {left} bytes of the file cannot be checked")


def rewrite(packed, change):
    """The first shard with its first Example changed, and an index that fits."""
    payloads = [payload for _, payload in walk(packed / SHARD)]
    features = {name: values[0] for name, values in decode(payloads[0]).items()}
    payloads[0] = encode(features | change)
    (packed / SHARD).write_bytes(b"".join(map(record, payloads)))
    (packed / INDEX).write_bytes(index_text(spans_of(packed / SHARD)))


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
def test_record_that_is_right_but_for_its_content(data, packed, change, what):
    rewrite(packed, change)
    code, out, _ = data("verify", packed)
    assert code == 1
    assert out[0].startswith(f"{packed / SHARD}, offset 0: {what}")
    assert f"{packed / SHARD}: " in out[1]  # it is not the shard of pack.json either


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (
            lambda good: good.splitlines(keepends=True)[0],
            "is stale: 1 records, the shard has 4; they differ from line",
        ),
        (
            lambda good: good.replace(b"0 ", b"1 ", 1),
            "is stale: 4 records, the shard has 4; they differ from line 1",
        ),
        (lambda good: good.replace(b" ", b"  "), "is not written as tfrecord2idx writes it"),
        (lambda good: b"no index", "is not an index (invalid literal"),
    ],
)
def test_stale_index_is_found(data, packed, spoil, what):
    (packed / INDEX).write_bytes(spoil((packed / INDEX).read_bytes()))
    code, out, _ = data("verify", packed)
    assert code == 1
    assert f"{packed / INDEX} {what}" in out[0]
    assert out[-1] == f"{packed}: 1 fault, 6 samples"


def test_shards_that_are_missing_cut_swapped_or_strange(data, packed):
    shard, offset = packed / SHARD, spans_of(packed / SHARD)[3][0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    _, out, _ = data("verify", packed)
    assert out[0].startswith(f"{shard}, offset {offset}: cut short, 5 of its ")
    assert out[1] == f"{shard}: 4 records, {len(whole) - 5} bytes; pack.json says 4 and {len(whole)}"
    shard.write_bytes(whole)
    content = json.loads((packed / "pack.json").read_text())
    content["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    (packed / "pack.json").write_text(json.dumps(content))
    assert data("verify", packed)[1][0] == f"{shard}: its sha256 is not that of pack.json; it is another shard"
    shard.rename(packed / "train/00001-of-00001.tfrecord")
    code, out, _ = data("verify", packed)
    assert code == 1
    assert out[0] == f"{packed}/train/00001-of-00001.tfrecord: not of this set, pack.json does not name it"
    assert out[1] == f"{shard}: cannot be read (No such file or directory)"


def test_odd_images_are_packed_as_they_are_and_the_broken_ones_named(data, tmp_path):
    root = write_folders(tmp_path / "images", train=2, val=1, classes=2).layout().root
    Image.new("L", (20, 20), 90).save(root / "train/a/grey.jpg")
    Image.new("CMYK", (20, 20)).save(root / "train/b/cmyk.jpg")
    truncate(root / "train/b/001.JPEG")
    (root / "val/b/000.JPEG").write_bytes(b"GIF89a no image")
    assert data("pack", root, tmp_path / "packed")[0] == 0
    code, out, _ = data("verify", tmp_path / "packed")
    assert code == 1
    assert out[-1].endswith("2 faults, 8 samples")
    assert "offset" in out[0]
    assert "b/001.JPEG cannot be decoded (OSError: " in out[0]
    assert "b/000.JPEG cannot be decoded (UnidentifiedImageError: " in out[1]
    code, out, _ = data("verify", root)
    assert code == 1
    assert out[0].startswith(f"{root}/train/b/001.JPEG: cannot be decoded (OSError: ")
    assert out[1].startswith(f"{root}/val/b/000.JPEG: cannot be decoded (UnidentifiedImageError: ")


def test_sample_images_and_text(data, tmp_path):
    code, out, _ = data("make-sample", "--root", tmp_path, "--train", 10, "--val", 10)
    assert (code, out) == (0, [f"{tmp_path}/sample_images-v1-10-10"])
    assert data("info", out[0])[1][2].startswith("train      10 images, ")
    code, out, err = data("make-sample", "--root", tmp_path, "--train", 3)
    assert (code, len(err)) == (2, 1)
    assert err[0].startswith("ddlbench.data: data.sample_train=3 is too small")


def test_mistakes_are_one_line(data, packed, tmp_path):
    (packed / "pack.json").rename(packed / "pack.unfinished.jsonl")
    (tmp_path / "empty").mkdir()
    for arguments, told in [
        (("info", tmp_path / "nothing"), "nothing does not exist"),
        (("verify", tmp_path / "empty"), "empty is none of: image folders"),
        (("verify", packed), "its packing was not finished: pack it again"),
        (("info", packed), "its packing was not finished: pack it again"),
        (("pack", tmp_path / "empty", tmp_path / "target"), "there is no folder"),
    ]:
        code, out, err = data(*arguments)
        assert (code, out, len(err)) == (2, [], 1)
        assert err[0].startswith("ddlbench.data: ")
        assert told in err[0]
    for arguments in ([], ["unpack"], ["pack", "a", "b", "--shard-mb", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)


def test_as_a_program(folders):
    command = [sys.executable, "-W", "error", "-m", "ddlbench.data", "info", folders.root]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kind       image folders\n")
