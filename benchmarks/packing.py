"""Image folders into a packed set, beside a plain copy of the same files into shards of the same size, turn by turn.

The copy reads the files in the order of the packed set and brings each shard to the disk before the next, as `pack`
does. "cold": the files are dropped from the page cache before each turn; "cached": they are read from it, so that what
`pack` computes is seen. Time is from the call to the end, with the start of a process, which matters for a set of a few
hundred MB and not for ImageNet: the second ratio is without it, that is without the time of packing twenty images.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.turns import peak_resident, ratio_text, show
from ddlbench.data.home import SPLITS
from ddlbench.data.images.decoding import decode_image
from ddlbench.data.images.folders import FolderSource
from ddlbench.data.images.index import FolderLayout, prepare_index
from ddlbench.data.page_cache import drop
from ddlbench.data.processes import usual_processes
from ddlbench.data.samples import SampleImages
from ddlbench.data.tfrecord import order
from ddlbench.data.tools import pack, shard_count
from ddlbench.files import replacing

SHARD_BYTES = 32_000_000
DECODED = 200  # images a turn
COUNTS = (3_000, 12_000)  # images, when memory is looked at


def copy(layout: FolderLayout, target: Path, shard_bytes: int) -> int:
    """The bytes written."""
    index, size = prepare_index(layout, None), 0
    for split, where, files in zip(SPLITS.values(), layout.splits, index.splits.values(), strict=True):
        source = FolderSource(where, where, index.classes, files, index.hash)
        (target / split).mkdir(parents=True)
        for number, chosen in enumerate(np.array_split(order(split, len(files)), shard_count(files, shard_bytes))):
            with replacing(target / split / str(number)) as out:
                size += sum(out.write(source.content(int(i))) for i in chosen)
    return size


def decode(images: list[Path]) -> None:
    for image in images:
        decode_image(image.read_bytes(), "pil")


def seconds(work: Callable[[Path], object], parent: Path) -> float:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        began = time.perf_counter()
        work(Path(folder) / "target")
        return time.perf_counter() - began


def compare(_: str, pairs: int) -> None:
    """Beside the sample images, so that images, copies and packed sets lie on one disk."""
    sample = SampleImages("sample_images")
    sample.prepare()
    layout = sample.layout()
    images = sorted(layout.root.glob("*/*/*.JPEG"))
    with tempfile.TemporaryDirectory(dir=layout.root.parent) as folder:
        few = link(Path(folder) / "few", images[:20], 20)
        for name in ("cold", "cached"):
            tell_speed(name, (layout, few), images, pairs)
        chosen = images[:: -(-len(images) // DECODED)]
        decoded = median(seconds(lambda _: decode(chosen), Path(folder)) for _ in range(pairs))
        show("decoding", f"{len(chosen) / decoded:.0f} images/s by one core")
        for count in COUNTS:
            tell_memory(images, Path(folder), count)


def tell_speed(name: str, layouts: tuple[FolderLayout, FolderLayout], images: list[Path], pairs: int) -> None:
    """layouts: of all images and of a few"""
    (layout, few), processes = layouts, usual_processes()
    works: list[Callable[[Path], object]] = [
        lambda target: copy(layout, target, SHARD_BYTES),
        lambda target: pack(layout, target, SHARD_BYTES, 1),
        lambda target: pack(layout, target, SHARD_BYTES, processes),
        lambda target: pack(few, target, SHARD_BYTES, 1),
    ]
    times: list[list[float]] = []
    for _ in range(pairs):
        times.append([])
        for work in works:
            if name == "cold":
                drop(images)
            times[-1].append(seconds(work, few.root.parent))
    megabytes = sum(image.stat().st_size for image in images) / 1e6
    copied, one, many, start = map(median, zip(*times, strict=True))
    show(f"pack/copy, {name}", f"ratio {ratio_text([row[0] / row[1] for row in times])} by 1 process")
    show("", f"ratio {ratio_text([row[0] / (row[1] - row[3]) for row in times])} without its start, {start:.2f} s")
    show("", f"ratio {ratio_text([row[0] / row[2] for row in times])} by {processes}")
    show("", f"{megabytes / one:.0f}, {megabytes / many:.0f} and {megabytes / copied:.0f} MB/s of {megabytes:.0f} MB")
    show("", f"{len(images) / one:.0f} and {len(images) / many:.0f} images/s packed")


def tell_memory(images: list[Path], place: Path, count: int) -> None:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        link(Path(folder) / "images", images, count)
        command = ("ddlbench.data", "pack", f"{folder}/images", f"{folder}/target", "--processes", "1")
        megabytes, _ = peak_resident(*command)
    show("pack's memory", f"{megabytes:.0f} MB resident at most with {count} images, parent and one process")


def link(folder: Path, images: list[Path], count: int) -> FolderLayout:
    """Image folders of `count` names, nine of ten for training: links to `images`, as often as it takes."""
    for number in range(count):
        image = images[number % len(images)]
        parent = folder / ("val" if number % 10 == 9 else "train") / image.parent.name
        parent.mkdir(parents=True, exist_ok=True)
        (parent / f"{number:06d}.JPEG").symlink_to(image)
    return FolderLayout(folder, "train", "val")
