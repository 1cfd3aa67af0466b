"""Data sets that others wrote or damaged: each outcome is a result or one line, never a traceback, never a wait."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddlbench.data.__main__ import main
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.images.packed import PackedImages
from ddlbench.data.text.dataset import TokenText
from ddlbench.errors import UserError
from tests.support.packs import pack_here
from tests.support.pictures import Shape, write_folders
from tests.support.text import model, write_text

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")
ESCAPE, REMOVED = "\x1b[2J\u202e\nx", "the key is removed"
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**400, 1.5, float("nan"), "", ESCAPE, "\ud800", "a\0b",
    "x" * 10**5, "../../etc/passwd", "/dev/zero", "train/../pipe", "train/pipe.tfrecord",
    "train/" + "x" * 300 + ".tfrecord", REMOVED, [], {}, [None], ["a", "a"], {"a": 1}, [{}] * 3, {ESCAPE: ESCAPE},
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image folders, the same packed and half packed, and a text with its token files and tables of lines."""
    base = tmp_path_factory.mktemp("base")
    folders = write_folders(base / "folders", train=2, val=1, classes=2)
    folders.prepare()
    pack_here(folders.layout(), base / "packed")
    PackedImages("packed", root=str(base / "packed")).prepare()
    shutil.copytree(base / "packed", base / "half")
    (base / "half/pack.json").unlink()
    plan = {"format": 1, "hash": folders.describe()["hash"], "shards": {"train": 1, "val": 1}}
    (base / "half/pack.unfinished.jsonl").write_text(json.dumps(plan) + "\n")
    (base / "text").mkdir()
    write_text(base / "text")
    TokenText("text", root=str(base / "text"), tokenize="on_the_fly").prepare()
    return base


@pytest.fixture
def sets(base: Path, tmp_path: Path, in_process: None) -> Path:
    """A copy to damage, with the times of its files."""
    copy = tmp_path / "sets"
    shutil.copytree(base, copy)
    os.mkfifo(copy / "packed/train/pipe.tfrecord")
    return copy


def uses(sets: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every command over every set, and every set as training and validation read it."""
    for name in ("packed", "half", "folders", "text"):
        yield f"info {name}", partial(main, ["info", str(sets / name)])
        yield f"verify {name}", partial(main, ["verify", str(sets / name)])
    for name in ("packed", "half"):
        yield f"pack {name}", partial(main, ["pack", str(sets / "folders"), str(sets / name), "--shard-mb", "1"])
    yield "tokenize", partial(main, ["tokenize", str(sets / "text/wiki.train.raw")])
    yield "open packed", partial(read_images, PackedImages("packed", root=str(sets / "packed")))
    yield "open folders", partial(read_images, ImageFolders("folders", root=str(sets / "folders")))
    for tokenize in ("ahead", "on_the_fly"):
        text = TokenText("text", root=str(sets / "text"), tokenize=tokenize)
        yield f"open text {tokenize}", partial(read_text, text)


def read_images(images: ImageFolders) -> None:
    images.check(Shape())
    images.prepare()
    images.describe()
    for train in (True, False):
        split = images.split(train, Shape(), 0)
        split.__getitems__([(0, index) for index in range(len(split))])


def read_text(text: TokenText) -> None:
    text.check(model(4))
    text.prepare()
    text.describe()
    for train in (True, False):
        split = text.split(train, model(4), 0)
        split.__getitems__([(0, index) for index in range(len(split))])


def check(sets: Path, capsys: pytest.CaptureFixture[str], what: str, only: str = "") -> set[object]:
    """The outcomes of every use, of the sets named alone."""
    result: set[object] = set()
    for name, use in uses(sets):
        if only in name:
            try:
                code = use()
            except UserError as error:
                code, said = 2, str(error)
            else:
                said = "".join(capsys.readouterr())
                assert code in (None, 0, 1, 2), (what, name, code)
                assert not CONTROL.search(said), (what, name, said)
            lines = [line for line in said.splitlines() if not line.startswith("packing ")]
            assert code != 2 or len(lines) == 1 or name.startswith("open"), (what, name, said)
            result.add(code)
    return result


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and every first element of JSON."""
    yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from places(value, (*path, key))
    elif isinstance(content, list) and content:
        yield from places(content[0], (*path, 0))


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = deepcopy(content)
    at = changed
    for key in path[:-1]:
        at = at[key]
    if value == REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("file", "only"),
    [("packed/pack.json", "packed"), ("text/wiki.train.raw-39-*.json", "text"), ("half/pack.unfinished.jsonl", "half")],
)
def test_any_value_in_any_place(sets: Path, capsys: pytest.CaptureFixture[str], file: str, only: str) -> None:
    (path,) = sets.glob(file)
    whole = path.read_text()
    lines = whole.splitlines() if file.endswith("l") else [whole]
    for number, line in enumerate(lines[:2]):
        content = json.loads(line)
        for place in places(content):
            for value in VALUES:
                others = [*lines[:number], json.dumps(replaced(content, place, value)), *lines[number + 1 :]]
                path.write_text("\n".join(others) + "\n")
                check(sets, capsys, f"{place} = {str(value)[:40]!a}", only)
                if not path.exists():  # packing has ended
                    path.parent.joinpath("pack.json").unlink()
    path.write_text(whole)
    assert 2 not in check(sets, capsys, "whole", only) or only == "half", "the sets can be used"


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "odd numbers": lambda path: path.write_text("-1 0\n99999999999999999999 16\n0 99999999999999999999\n"),
    "deep": lambda path: path.write_text("[" * 10**5),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "circle": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "sparse": lambda path: (path.write_bytes(b""), os.truncate(path, 2**26)),  # more than JSON may have
}
FILES = (
    "packed/pack.json", "packed/train/*1.tfrecord", "packed/train/*.idx", "packed/.ddlbench/*.npz",
    "half/pack.unfinished.jsonl", "half/train/*1.tfrecord", "half/train/*.idx", "folders/.ddlbench/*.npz",
    "folders/train/a/000.JPEG", "text/*.bin", "text/*-39-*.json", "text/*.lines", "text/vocab.json", "text/merges.txt",
    "text/wiki.train.raw",
)  # fmt: skip


TEXTS = {(damage, "text/wiki.train.raw") for damage in ("sparse", "deep")}  # as good as any other, and long


@pytest.mark.parametrize(("damage", "pattern"), [case for case in product(DAMAGES, FILES) if case not in TEXTS])
def test_any_damage_of_any_file(sets: Path, capsys: pytest.CaptureFixture[str], pattern: str, damage: str) -> None:
    paths = sorted(sets.glob(pattern))
    for path in paths[:1]:
        DAMAGES[damage](path)
        check(sets, capsys, f"{damage} {path.name}", pattern.partition("/")[0])
