"""A tree of a million image names: made, listed and indexed, opened again, and removed.

The names of a class are links to one empty file: it is names that are measured, and a million files made and removed
keep some file systems busy for minutes. The system has the folders in memory, because they were
written just before; from a disk or a network they come slower, in the same memory of ours.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.turns import peak_resident, show
from ddlbench.data.images.index import FolderLayout, Index, open_index, prepare_index

NAMES, CLASSES = 1_280_000, 1_000
IMAGES_A_VALIDATION_IMAGE = 26  # ImageNet has 1,281,167 and 50,000


def make_tree(root: Path, names: int, classes: int) -> None:
    """ImageNet's folders and names, e.g. train/n00000007/n00000007_00012.JPEG."""
    for number in range(classes):
        label, images_a_class = f"n{number:08d}", names // classes
        validation = -(-images_a_class // IMAGES_A_VALIDATION_IMAGE)
        for split, images in (("val", range(validation)), ("train", range(validation, images_a_class))):
            (folder := root / split / label).mkdir(parents=True)
            (first := folder / "image").touch()
            for image in images:
                os.link(first, f"{folder}/{label}_{image:05d}.JPEG")
            first.unlink()


def index(root: Path) -> None:
    """Print images, seconds to list, to open as a rank does, to open after a look at the folders, and the file's MB."""
    layout, clock = FolderLayout(root, "train", "val"), [time.perf_counter()]
    for work in (prepare_index, open_index, prepare_index):
        images = samples(work(layout, None))
        clock.append(time.perf_counter())
    (file,) = (root / ".ddlbench").iterdir()
    spans = (after - before for before, after in pairwise(clock))
    print(images, *spans, file.stat().st_size / 1e6)


def samples(index: Index) -> int:
    return len(index.splits["train"]) + len(index.splits["val"])


def measure(names: int, classes: int) -> tuple[float, list[float]]:
    """The most MB resident in a process of its own, and what `index` printed."""
    with tempfile.TemporaryDirectory() as folder:
        make_tree(Path(folder), names, classes)
        most, printed = peak_resident("benchmarks.indexing", folder)
    return most, [float(number) for number in printed.split()]


def compare(name: str, _: int) -> None:
    """Few names first: what Python and numpy take by themselves."""
    for count in (CLASSES * 2, NAMES):
        most, (images, listed, opened, looked, megabytes) = measure(count, CLASSES)
        show(name, f"{images:.0f} names in {CLASSES} classes: listed in {listed:.2f} s, {megabytes:.1f} MB")
        show("", f"opened in {opened:.3f} s, with a look at the folders in {looked:.3f} s")
        show("", f"{most:.0f} MB resident at most")


if __name__ == "__main__":
    index(Path(sys.argv[1]))
