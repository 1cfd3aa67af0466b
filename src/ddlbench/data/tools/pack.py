"""Packs image folders (data/tfrecord/packed.py) with several processes; resumes where an earlier attempt ended.

A shard gets its final name when it is complete and on disk, and then its line in pack.unfinished.jsonl, whose first
line describes the set. pack.json replaces that file when all shards are complete. The same folders give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

import numpy as np

from ddlbench.data.images.index import Files, FolderLayout, Index, prepare_index
from ddlbench.data.processes import in_processes
from ddlbench.data.tfrecord import packed
from ddlbench.data.tfrecord.packed import Pack, Shard
from ddlbench.data.tfrecord.records import FRAME, Span, crc32c, encode, index_text, record, walk
from ddlbench.errors import UserError, reporting
from ddlbench.files import replace_json, replacing
from ddlbench.foreign import from_json, parse, read_bytes, regular_size, sha256_of
from ddlbench.progress import Progress
from ddlbench.texts import shortened

WRITE_AGAIN = "free space or repair the disk, then run the command again; finished shards are kept"
READERS = 4  # images at once: a disk, and a parallel file system even more, is quicker with several than with one
READ_AHEAD = 32  # images


Image = tuple[str, int, int]  # <class>/<name>, label, bytes


def pack(layout: FolderLayout, target: Path, shard_bytes: int, processes: int) -> Pack:
    """Pack image folders into `target`, in shards of about `shard_bytes`. Raises UserError for folders that cannot be
    used, a target that holds something else, and a full disk; Unavailable without google-crc32c."""
    crc32c()  # a missing library is reported before the work begins
    index = prepare_index(layout, None)
    counts = {split: shard_count(files, shard_bytes) for split, files in index.splits.items()}
    plan = {"format": packed.FORMAT, "hash": index.hash, "shards": counts}
    total, finished, progress = sum(counts.values()), list[Shard](), Progress(enabled=True)
    processes = min(processes, total)
    with reporting(f"cannot write {target}", WRITE_AGAIN):
        earlier = earlier_shards(target, plan)
        for split in counts:
            (target / split).mkdir(parents=True, exist_ok=True)
        with replacing(target / packed.UNFINISHED) as ledger:
            ledger.writelines(map(_line, [plan, *map(asdict, earlier.values())]))
        again = f"; {len(earlier)} exist already and are checked" if earlier else ""
        progress.say(f"packing {total} shards into {target}, {processes} at a time{again}")
        shards = in_processes(call, _jobs(target, layout, index, counts, earlier), processes)
        with (target / packed.UNFINISHED).open("ab", buffering=0) as ledger:
            for shard in progress.steps(shards, total, "packing, shard", "shards"):
                finished.append(shard)
                ledger.write(_line(asdict(shard)))
        finished.sort(key=lambda shard: shard.file)
        parts = {split: tuple(shard for shard in finished if shard.file.startswith(f"{split}/")) for split in counts}
        splits = {split: packed.PackedSplit.of(shards) for split, shards in parts.items()}
        made = Pack(packed.FORMAT, index.hash, index.classes, splits)
        replace_json(target / packed.MANIFEST, asdict(made))
        (target / packed.UNFINISHED).unlink()
    return made


def shard_count(files: Files, shard_bytes: int) -> int:
    return min(len(files), max(1, -(-int(files.sizes.sum()) // shard_bytes)))


def earlier_shards(target: Path, plan: dict[str, Any]) -> dict[str, Shard]:
    """The shards that earlier attempts at `plan` made, by file. Raises UserError where `target` is of another plan."""
    if (target / packed.MANIFEST).is_file():
        manifest = packed.read_manifest(target)
        sizes = {split: len(part.shards) for split, part in manifest.splits.items()}
        begun, shards = {"format": manifest.format, "hash": manifest.hash, "shards": sizes}, manifest.shards
    elif packed.is_packed(target):
        path = target / packed.UNFINISHED
        try:  # a killed attempt may leave half a line at the end, or none
            lines = [line for line in read_bytes(path).splitlines(keepends=True) if line.endswith(b"}\n")]
            begun, *entries = map(parse, lines or [b"{}"])
            shards = [from_json(Shard, shard) for shard in entries]
        except ValueError as error:
            raise UserError(
                f"{path} is not what an earlier attempt leaves ({error}): delete it and pack again"
            ) from error
    elif target.exists() and any(target.iterdir()):
        raise UserError(f"{target} holds other files: give an empty or a new folder for the packed set")
    else:
        return {}
    if begun and begun != plan:
        what = "these images in other shards" if begun.get("hash") == plan["hash"] else "a packed set of other images"
        odd = [key for key in plan if begun.get(key) != plan[key]]
        differences = ", ".join(f"{shortened(str(begun.get(key)), 80)} is not {plan[key]}" for key in odd)
        raise UserError(f"{target} holds {what} ({differences}): give another folder, or delete this one")
    return {shard.file: shard for shard in shards}


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _jobs(
    target: Path, layout: FolderLayout, index: Index, counts: dict[str, int], earlier: dict[str, Shard]
) -> Iterator[Callable[[], Shard]]:
    """Jobs are made one after another, because the names of a million files as Python strings would take 100 MB."""
    for (split, files), source in zip(index.splits.items(), layout.splits, strict=True):
        for number, chosen in enumerate(np.array_split(packed.order(split, len(files)), counts[split])):
            file = f"{split}/{number:05d}-of-{counts[split]:05d}.tfrecord"
            images = tuple(
                (f"{index.classes[files.labels[i]]}/{files.name(i)}", int(files.labels[i]), int(files.sizes[i]))
                for i in chosen
            )
            yield partial(make_shard, target, file, source, images, earlier.get(file))


def make_shard(target: Path, file: str, source: Path, images: Sequence[Image], earlier: Shard | None) -> Shard:
    """A shard of set `target` and its index on disk: those of an earlier attempt if their bytes are still the same,
    else new ones. No more than READ_AHEAD images are in memory."""
    path = target / file
    if earlier is not None and intact(path, earlier):
        return earlier
    with reporting(f"cannot write {path}", WRITE_AGAIN), ThreadPoolExecutor(READERS) as pool:
        with replacing(path) as out:
            spans, size, digest = list[Span](), 0, hashlib.sha256()
            for start in range(0, len(images), READ_AHEAD):
                part = images[start : start + READ_AHEAD]
                for (name, label, _), content in zip(part, pool.map(partial(_read, source), part), strict=True):
                    features = {packed.ENCODED: content, packed.LABEL: label, packed.FILENAME: os.fsencode(name)}
                    written = record(encode(features))
                    out.write(written)
                    digest.update(written)
                    spans.append((size, len(written)))
                    size += len(written)
        with replacing(packed.index_path(path)) as out:
            out.write(index_text(spans))
    return Shard(file, len(images), size, digest.hexdigest())


def intact(path: Path, expected: Shard) -> bool:
    try:
        if regular_size(path) != expected.bytes or sha256_of(path) != expected.sha256:
            return False
        spans = ((offset, len(payload) + FRAME) for offset, payload in walk(path) if isinstance(payload, bytes))
        return read_bytes(packed.index_path(path), packed.LARGEST_INDEX) == index_text(spans)
    except (OSError, ValueError):
        return False


def _read(folder: Path, image: Image) -> bytes:
    path, expected = folder / image[0], image[2]
    with reporting(f"cannot read {path}", "restore or remove it, then pack again"):
        content = path.read_bytes()
    if len(content) != expected:
        raise UserError(
            f"{path} has {len(content)} bytes, {expected} when the folders were indexed: "
            f"delete the index (.ddlbench in the images' folder), then pack again"
        )
    return content
