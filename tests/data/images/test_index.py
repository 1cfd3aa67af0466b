"""The index of image files on a hand-made folder; see data/images/index.py."""

from __future__ import annotations

import hashlib
import os
import tempfile
import tracemalloc
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ddlbench.data.images.index import FolderLayout, open_index, prepare_index
from ddlbench.errors import UserError


@pytest.fixture
def layout(tmp_path):
    """Two classes; the files' contents do not matter here."""
    for path, content in {
        "train/cat/b.JPEG": "12",
        "train/cat/a.jpg": "1",
        "train/dog/é.png": "123",
        "train/dog/notes.txt": "no image",
        "train/dog/.hidden.JPEG": "no image",
        "val/cat/v.jpeg": "1234",
        "val/dog/w.JPG": "12345",
    }.items():
        file = tmp_path / "set" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return FolderLayout(tmp_path / "set", "train", "val")


def listing(files):
    return [(files.name(i), int(files.sizes[i]), int(files.labels[i])) for i in range(len(files))]


def test_files_in_order_of_class_then_name(layout):
    index = prepare_index(layout, None)
    assert index.classes == ("cat", "dog")
    assert listing(index.splits["train"]) == [("a.jpg", 1, 0), ("b.JPEG", 2, 0), ("é.png", 3, 1)]
    assert listing(index.splits["val"]) == [("v.jpeg", 4, 0), ("w.JPG", 5, 1)]


def test_names_that_are_not_utf_8_lie_in_the_order_of_their_bytes(layout):
    """As in a packed set. As texts "\\udcff", which Python makes of such a byte, is before "\\ue000"."""
    for name in ("\udcff.jpg", "\ue000.jpg"):
        (layout.root / "val/dog" / name).write_text("12")
    files = prepare_index(layout, None).splits["val"]
    assert files.names.tolist() == [b"v.jpeg", b"w.JPG", b"\xee\x80\x80.jpg", b"\xff.jpg"]


def test_hash_covers_names_and_sizes_of_both_splits(layout):
    lines = ["train/cat/a.jpg\0001", "train/cat/b.JPEG\0002", "train/dog/é.png\0003", "val/cat/v.jpeg\0004"]
    text = "".join(f"{line}\n" for line in [*lines, "val/dog/w.JPG\0005"])
    assert prepare_index(layout, None).hash == hashlib.sha256(text.encode()).hexdigest()


def test_kept_arrays(layout):
    """Their types too: an index made by one version is read by the next."""
    prepare_index(layout, None)
    (file,) = (layout.root / ".ddlbench").iterdir()
    with np.load(file) as kept:
        arrays = {name: kept[name] for name in kept.files if name != "about"}
    expected = {
        "train_names": [b"a.jpg", b"b.JPEG", "é.png".encode()], "train_sizes": [1, 2, 3], "train_labels": [0, 0, 1],
        "val_names": [b"v.jpeg", b"w.JPG"], "val_sizes": [4, 5], "val_labels": [0, 1],
    }  # fmt: skip
    assert {name: array.tolist() for name, array in arrays.items()} == expected
    types = {"names": "S6", "sizes": "int64", "labels": "int32"}
    assert all(array.dtype == types[name.split("_")[1]] for name, array in arrays.items())


@pytest.fixture
def many(tmp_path):
    """20,000 names in 200 classes, all of one file."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        root = Path(folder)
        (root / "image").write_text("1")
        for label, (split, count) in product(range(200), (("train", 99), ("val", 1))):
            (held := root / split / f"n{label:08d}").mkdir(parents=True)
            for number in range(count):
                os.link(root / "image", held / f"n{label:08d}_{number:05d}.JPEG")
        yield FolderLayout(root, "train", "val")


def test_memory_is_that_of_the_index(many):
    tracemalloc.start()
    try:
        index = prepare_index(many, None)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(index.splits["train"]), len(index.splits["val"])) == (19_800, 200)
    size = sum(array.nbytes for files in index.splits.values() for array in vars(files).values())
    # Threads that wait hold more at the same time; a tuple, a string and a number for every file would be 28 times it.
    assert most < 5 * size


def test_kept_index_is_used_until_a_folder_changes(layout, monkeypatch):
    first = prepare_index(layout, None)
    with monkeypatch.context() as patch:
        patch.setattr("ddlbench.data.images.index.scan", lambda _: pytest.fail("scanned again"))
        for index in (prepare_index(layout, None), open_index(layout, None)):
            assert index.hash == first.hash
            assert listing(index.splits["train"]) == listing(first.splits["train"])
    (layout.root / "val/dog/x.png").write_text("new")
    os.utime(layout.root / "val/dog", ns=(1, 1))  # a clock's tick may be coarser than this test
    assert open_index(layout, None).hash == first.hash  # does not look
    assert listing(prepare_index(layout, None).splits["val"])[-1] == ("x.png", 3, 1)
    assert open_index(layout, None).hash != first.hash


def test_damaged_index_is_made_anew(layout):
    hash = prepare_index(layout, None).hash
    (file,) = (layout.root / ".ddlbench").iterdir()
    for content in (b"", b"PK\3\4 torn", file.read_bytes()[:-40]):
        file.write_bytes(content)
        assert open_index(layout, None).hash == hash


def test_cache_folder_of_the_users_choice(layout, tmp_path):
    prepare_index(layout, str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert not (layout.root / ".ddlbench").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep the index .*data.cache_dir"):
        prepare_index(layout, str(tmp_path / "file" / "cache"))


def test_copy_of_a_set_has_its_hash(layout, tmp_path):
    hash = prepare_index(layout, None).hash
    copy = tmp_path / "copy"
    (tmp_path / "set").rename(copy)
    (copy / "val").rename(copy / "validation")
    assert prepare_index(FolderLayout(copy, "train", "validation"), None).hash == hash


def test_missing_and_empty_folders_are_named(layout, tmp_path):
    with pytest.raises(UserError, match=r"there is no folder .*nowhere/train.*<class>"):
        prepare_index(FolderLayout(tmp_path / "nowhere", "train", "val"), None)
    (tmp_path / "set/flat").mkdir()
    (tmp_path / "set/flat/image.JPEG").write_text("")
    with pytest.raises(UserError, match=r"set/flat holds no class folders"):
        prepare_index(FolderLayout(tmp_path / "set", "train", "flat"), None)
    (layout.root / "train/cat/a.jpg").unlink()
    (layout.root / "train/cat/b.JPEG").unlink()
    with pytest.raises(UserError, match=r"train/cat holds no image \(.jpg, .jpeg, .png\)"):
        prepare_index(layout, None)


def test_classes_that_differ_are_named_up_to_three(layout):
    (layout.root / "val/bird").mkdir()
    with pytest.raises(UserError, match=r"\(2 and 3\): only one has bird; make"):
        layout.classes()
    for name in ("eel", "fox", "gnu"):
        (layout.root / "train" / name).mkdir()
    with pytest.raises(UserError, match=r"\(5 and 3\): only one has bird, eel, fox, and 1 more; make"):
        layout.classes()


def test_links_that_lead_nowhere_are_counted_and_named(layout):
    train = layout.splits[0]
    for name in ("gone-1.jpg", "gone-2.jpg"):
        (train / "cat" / name).symlink_to(train / "nowhere.jpg")
    (train / "dog" / "circle.png").symlink_to(train / "dog" / "circle.png")
    (train / "dog" / "good.png").symlink_to(train / "dog" / "é.png")
    with pytest.raises(UserError, match=r"3 image links point to no file \(.*cat/gone-1.jpg, .*gone-2.jpg, .*circle"):
        prepare_index(layout, None)
    for name in ("cat/gone-1.jpg", "cat/gone-2.jpg", "dog/circle.png"):
        (train / name).unlink()
    assert len(prepare_index(layout, None).splits["train"]) == 4


def test_a_class_folder_that_is_a_link_to_nothing_is_no_class_less(layout):
    for split in layout.splits:
        (split / "emu").symlink_to(layout.root / "moved")
    with pytest.raises(UserError, match=r"emu cannot be read \(No such file or directory\): restore"):
        layout.classes()


def test_a_class_folder_costs_no_request_of_its_own(layout, monkeypatch):
    """Every rank lists the classes before the start: the file server has to answer a thousand of them."""
    listed, asked = os.scandir, list[str]()

    class Entry:
        def __init__(self, entry):
            self.entry = entry

        def __getattr__(self, name):
            return getattr(self.entry, name)

        def stat(self):
            asked.append(self.entry.name)
            return self.entry.stat()

    (layout.splits[1] / "emu").symlink_to(layout.splits[1] / "cat")
    (layout.splits[0] / "emu").mkdir()
    monkeypatch.setattr(os, "scandir", lambda folder: nullcontext([Entry(entry) for entry in listed(folder)]))
    assert layout.classes() == ["cat", "dog", "emu"]
    assert asked == ["emu"]


def test_a_class_folder_that_is_a_link_in_a_circle_is_one_line(layout):
    for split in layout.splits:
        (split / "owl").symlink_to(split / "owl")
    with pytest.raises(UserError, match=r"train/owl cannot be read \(Too many levels of symbolic links\)"):
        prepare_index(layout, None)
