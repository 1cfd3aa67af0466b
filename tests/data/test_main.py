"""python -m ddlbench.data, by its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from ddlbench.data.__main__ import main
from ddlbench.data.samples import train_bpe
from ddlbench.data.text.token_file import TokenFile, TokenizerFiles, token_path
from tests.support.packs import flip
from tests.support.pictures import truncate, write_folders
from tests.support.waiting import WITHIN_S

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def data(capsys):
    """Runs the program; exit code, and the lines of what it printed and of what it said."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run


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
        assert out[-1] == f"{place}: no faults, 6 samples"


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


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_class_with_a_control_character_is_printed_escaped(data, tmp_path, command):
    root = write_folders(tmp_path / "images", train=1, val=1, classes=2).layout().root
    for split in ("train", "val"):
        (root / split / "a").rename(root / split / "\x1b[2J")
    code, out, err = data(command, root)
    assert (code, err) == (0, [])
    assert any("\\x1b[2J" in line for line in out)
    assert all(line.isprintable() for line in out)


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


def test_sample_images_are_made(data, tmp_path):
    code, out, _ = data("make-sample", "--root", tmp_path, "--train", 10, "--val", 10)
    assert (code, out) == (0, [f"{tmp_path}/sample_images-v1-10-10"])
    assert data("info", out[0])[1][2].startswith("train      10 images, ")
    code, out, err = data("make-sample", "--root", tmp_path, "--train", 3)
    assert (code, len(err)) == (2, 1)
    assert err[0].startswith("ddlbench.data: data.sample_train=3 must be 10 or more")


@pytest.fixture
def text(tmp_path):
    """A text with a tokenizer beside it."""
    (tmp_path / "text").mkdir()
    path = tmp_path / "text" / "some.txt"
    path.write_text("Loaders feed models.\n\nModels read what loaders feed.\n" * 50)
    train_bpe(path.read_text(), 270, path.parent)
    return path


def test_text_to_a_checked_token_file(data, text, tmp_path):
    code, out, err = data("tokenize", text)
    target = Path(out[0].rpartition(": ")[0])
    assert (code, err) == (0, [])
    assert target == token_path(text, TokenizerFiles.find(text.parent).hash(), None)  # where a run looks for it
    tokens = TokenFile.open(target).read()
    assert out == [f"{target}: {len(tokens)} tokens"]
    assert TokenizerFiles.find(text.parent).load().core.decode(tokens.tolist()) == text.read_text()
    made = target.stat().st_mtime_ns
    assert data("tokenize", text)[0] == 0
    assert target.stat().st_mtime_ns == made
    assert data("tokenize", text, "--out", tmp_path / "new/my.bin", "--tokenizer", text.parent)[0] == 0
    assert (tmp_path / "new/my.bin").read_bytes() == target.read_bytes()


def test_token_files_are_described_and_checked(data, text):
    data("tokenize", text, "--out", target := text.with_suffix(".bin"))
    code, out, _ = data("info", target)
    assert code == 0
    assert out[0] == "kind       token file some.bin, format 1"
    assert out[2].startswith("text       some.txt: 400 words, 150 lines, ")
    assert data("verify", text.parent) == (0, [f"{text.parent}: no faults"], [])
    flip(target, 7)
    assert data("verify", target)[:2] == (
        1,
        [f"{target}: its sha256 is not the one in some.json", f"{target}: 1 fault"],
    )
    data("tokenize", text, "--out", cut := target.with_name("cut.bin"))
    cut.write_bytes(cut.read_bytes()[:-2])
    code, out, err = data("verify", text.parent)  # also the other file
    assert (code, out[1:], err) == (
        1,
        [f"{target}: its sha256 is not the one in some.json", f"{text.parent}: 2 faults"],
        [],
    )
    assert out[0].startswith(f"token file {cut} has ")


def test_mistakes_are_refused_in_one_line(data, packed, text, tmp_path):
    (packed / "pack.json").rename(packed / "pack.unfinished.jsonl")
    (tmp_path / "empty").mkdir()
    for arguments, message in [
        (("info", tmp_path / "nothing"), "nothing does not exist"),
        (("verify", tmp_path / "empty"), "empty is not one of: image folders"),
        (("verify", packed), "it was not packed completely: pack it again"),
        (("info", packed), "it was not packed completely: pack it again"),
        (("pack", tmp_path / "empty", tmp_path / "target"), "there is no folder"),
        (("info", tmp_path / "no.bin"), "no.bin has no index"),
        (("tokenize", tmp_path / "no.txt"), "no.txt is not a text file"),
        (("tokenize", text, "--tokenizer", tmp_path / "empty"), "empty: give --tokenizer a folder with vocab.json"),
        (("tokenize", text, "--out", text), "some.txt does not end in .bin"),
        (("tokenize", text, "--out", text.parent / "vocab.bin"), "vocab.json, which would be a part of it"),
        (("tokenize", text, "--out", text / "x/a.bin"), "a.bin (Not a directory): choose another --out"),
    ]:
        code, out, err = data(*arguments)
        assert (code, out, len(err)) == (2, [], 1)
        assert err[0].startswith("ddlbench.data: ")
        assert message in err[0]
    for arguments in ([], ["unpack"], ["pack", "a", "b", "--shard-mb", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)


def test_as_a_program(folders):
    command = [sys.executable, "-W", "error", "-m", "ddlbench.data", "info", folders.root]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN_S, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kind       image folders\n")


def test_a_subset_of_classes_is_links_drawn_from_a_seed(data, tmp_path):
    whole = write_folders(tmp_path / "all", train=2, val=1, classes=5).layout()
    chosen = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        code, out, _ = data("subset", whole.root, tmp_path / name, "--classes", 3, "--seed", seed)
        assert code == 0
        assert "3 of 5 classes" in out[0]
        chosen.append(sorted(path.name for path in (tmp_path / name / "train").iterdir()))
        assert chosen[-1] == sorted(path.name for path in (tmp_path / name / "val").iterdir())
    assert chosen[0] == chosen[1] != chosen[2]
    assert data("verify", tmp_path / "a")[1][-1].endswith("no faults, 9 samples")
    assert data("subset", whole.root, tmp_path / "a", "--classes", 3)[::2] == (
        2, [f"ddlbench.data: {tmp_path / 'a'} exists: choose a new folder, or remove it"],
    )  # fmt: skip
    assert data("subset", whole.root, tmp_path / "d", "--classes", 6)[0] == 2
    assert not (tmp_path / "d").exists()
