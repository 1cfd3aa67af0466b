"""Both sides of every comparison of benchmarks/loaders.py do the same work, at a small size. Speed is not measured."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch

from benchmarks import images, indexing, packing, reading, windows
from benchmarks.bare import imagefolder
from benchmarks.turns import peak_resident
from ddlbench.data.images.index import FolderLayout
from ddlbench.data.samples import SampleText
from ddlbench.data.text.dataset import TokenText
from ddlbench.data.tfrecord import walk
from ddlbench.data.tools import pack
from ddlbench.models.gpt2 import GPT2
from tests.support.libraries import needs_dali
from tests.support.packs import image_of
from tests.support.pictures import write_folders

BATCH, SIZE, WORKERS = 4, 32, 2
TRAIN, CLASSES = 9, 3  # 27 images: 6 batches and 3 images left over


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    write_folders(root, train=TRAIN, val=2, classes=CLASSES)
    return root


def by_dali(*arguments):
    from benchmarks.bare import dali

    return ([(batch["data"], batch["label"].flatten()) for (batch,) in epoch] for epoch in dali.epochs(*arguments))


def by_ddlbench(name):
    return lambda *arguments: (
        [(batch.inputs, batch.targets) for batch in epoch] for epoch in reading.epochs(name, *arguments)
    )


SIDES = [
    by_ddlbench("native"),
    imagefolder.epochs,
    pytest.param(by_ddlbench("dali"), marks=needs_dali),
    pytest.param(by_dali, marks=needs_dali),
]


@pytest.mark.parametrize("epochs", SIDES, ids=["native", "torchvision", "dali", "dali by hand"])
def test_every_reader_of_images_gives_the_same_kind_of_epochs(folder, epochs):
    for epoch in islice(epochs(str(folder), BATCH, SIZE, WORKERS), 2):
        batches = list(epoch)
        assert [tuple(inputs.shape) for inputs, _ in batches] == [(BATCH, 3, SIZE, SIZE)] * 6
        assert {inputs.dtype for inputs, _ in batches} == {torch.float32}
        assert {targets.dtype for _, targets in batches} <= {torch.int64, torch.int32}  # DALI's own labels
        labels = Counter(label for _, targets in batches for label in targets.tolist())
        assert set(labels) == {0, 1, 2}
        assert max(labels.values()) <= TRAIN
        pixels = torch.cat([inputs for inputs, _ in batches])
        assert abs(pixels.mean()) < 0.6  # normalized alike
        assert 0.6 < pixels.std() < 1.6


@pytest.mark.slow
def test_programs_take_turns(folder, tmp_path):
    """Both go on after each stop, and what they printed falls into their own turns. A busy machine may lose a pair."""
    native, torchvision = (
        images.command(side, folder, BATCH, SIZE, WORKERS) for side in (images.NATIVE, ("benchmarks.bare.imagefolder",))
    )
    pairs = images.read_by_turns([native, torchvision], tmp_path, pairs=4, turn_s=1.0)
    assert len(pairs.complete) + len(pairs.lost) == 4
    assert len(pairs.complete) >= 2
    assert all(seconds > 0 for pair in pairs.complete for seconds in pair)


def test_both_readers_of_text_give_the_same_kind_of_windows(tmp_path):
    text = SampleText("sample_text", root=str(tmp_path), vocab_size=300)
    text.prepare()
    own, count = windows.from_tokens(TokenText("text", root=str(text.folder())), 2, 16)
    other = windows.on_the_fly(text.folder(), 2, 16, count)
    assert len(windows.loader(text.folder(), 2, 16, count)) == count // 2
    gpt2 = GPT2("gpt2", n_layer=1, n_embd=4, n_head=1, vocab_size=300, seq_len=16)
    text_of: Any = TokenText("text", root=str(text.folder())).split(True, gpt2, 0).tokens.tolist()
    for side in (own, other):
        for inputs, targets in islice(side, 3):
            assert inputs.shape == targets.shape == (2, 16)
            assert inputs.dtype == targets.dtype == torch.int64
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            assert all(contains(text_of, window.tolist()) for window in inputs)


def contains(text, window):
    return any(text[at : at + len(window)] == window for at in range(len(text)) if text[at] == window[0])


def test_a_packed_set_holds_the_bytes_that_a_copy_holds(folder, tmp_path):
    layout = FolderLayout(folder, "train", "val")
    packing.copy(layout, tmp_path / "copy", shard_bytes=4_000)
    pack(layout, tmp_path / "pack", shard_bytes=4_000, processes=1)
    for split in ("train", "val"):
        shards = sorted((tmp_path / "pack" / split).glob("*.tfrecord"))
        copies = sorted((tmp_path / "copy" / split).iterdir(), key=lambda path: int(path.name))
        assert len(shards) == len(copies) > 1
        for shard, copy in zip(shards, copies, strict=True):
            images_of = [image_of(example).encoded for *_, example in walk(shard) if isinstance(example, bytes)]
            assert copy.read_bytes() == b"".join(images_of)


def test_a_tree_of_links_has_the_images_of_the_folder(folder, tmp_path):
    given = sorted(folder.glob("*/*/*.JPEG"))
    packing.link(tmp_path, given, 100)
    made = sorted(tmp_path.glob("*/*/*.JPEG"))
    assert Counter(path.parts[-3] for path in made) == {"train": 90, "val": 10}
    assert {path.read_bytes() for path in made} == {path.read_bytes() for path in given}


def test_index_of_a_made_tree():
    most, (count, listed, opened, looked, megabytes) = indexing.measure(names=600, classes=3)
    assert count == 600
    assert 0 < megabytes < 0.1
    assert min(listed, opened, looked) > 0
    assert 20 < most < 200


def test_peak_is_that_of_all_processes_together(tmp_path, monkeypatch):
    (tmp_path / "hungry.py").write_text(
        "import subprocess, sys\n"
        "held = b'1' * 40_000_000\n"
        "if sys.argv[1:]: subprocess.run([sys.executable, __file__], check=True)\n"
        "else: import time; time.sleep(0.5)\n"
        "print('done', flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    most, printed = peak_resident("hungry", "more")
    assert printed.split() == ["done", "done"]
    assert 80 < most < 140
