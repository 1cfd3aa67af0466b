"""Packs image folders (data/tfrecord/packed.py) with several processes; resumes where an earlier attempt ended.

A shard gets its final name when it is complete and on disk, and then its line in pack.unfinished.jsonl, whose first
line describes the set. pack.json replaces that file when all shards are complete. The same folders give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddlbench.data.home import SPLITS
from ddlbench.data.images.index import Files, FolderLayout, Index, prepare_index
from ddlbench.data.processes import in_processes
from ddlbench.data.tfrecord.packed import (
    FORMAT,
    LARGEST_INDEX,
    MANIFEST,
    UNFINISHED,
    Pack,
    PackedSplit,
    Shard,
    example_of,
    index_path,
    is_packed,
    order,
    read_manifest,
)
from ddlbench.data.tfrecord.records import FRAME, Span, crc32c, index_text, record, walk
from ddlbench.errors import UserError, reporting
from ddlbench.files import replacing
from ddlbench.foreign import from_json, parse, read_bytes, regular_size, sha256_of
from ddlbench.progress import Progress
from ddlbench.texts import shortened

WRITE_AGAIN = "free space or repair the disk, then run the command again; finished shards are kept"
READ_AHEAD = 4  # images at once: a disk, and a parallel file system even more, is quicker with several than with one


@dataclass(frozen=True)
class ShardToMake:
    """One shard to make in set `target`. images: (<class>/<name>, label, bytes); earlier: of an earlier attempt"""

    target: Path
    file: str
    source: Path
    images: tuple[tuple[str, int, int], ...]
    earlier: Shard | None = None


def pack(layout: FolderLayout, target: Path, shard_bytes: int, processes: int) -> Pack:
    """Pack image folders into `target`, in shards of about `shard_bytes`.

    Raises UserError for folders that cannot be used, a target that holds something else, and a full disk;
    Unavailable without google-crc32c.
    """
    crc32c()  # a missing library is reported before the work begins
    index = prepare_index(layout, None)
    counts = {split: shard_count(files, shard_bytes) for split, files in index.splits.items()}
    plan = {"format": FORMAT, "hash": index.hash, "shards": counts}
    total, finished, progress = sum(counts.values()), dict[str, Shard](), Progress(enabled=True)
    processes = min(processes, total)
    with reporting(f"cannot write {target}", WRITE_AGAIN):
        earlier = earlier_shards(target, plan)
        for split in SPLITS.values():
            (target / split).mkdir(parents=True, exist_ok=True)
        with replacing(target / UNFINISHED) as ledger:
            ledger.writelines(map(_line, [plan, *map(asdict, earlier.values())]))
        again = f"; {len(earlier)} exist already and are checked" if earlier else ""
        progress.say(f"packing {total} shards into {target}, {processes} at a time{again}")
        shards = in_processes(make_shard, _jobs(target, layout, index, counts, earlier), processes)
        with (target / UNFINISHED).open("ab", buffering=0) as ledger:
            for shard in progress.steps(shards, total, "packing, shard", "shards"):
                finished[shard.file] = shard
                ledger.write(_line(asdict(shard)))
        splits = {
            split: PackedSplit.of(tuple(finished[file] for file in sorted(finished) if file.startswith(f"{split}/")))
            for split in SPLITS.values()
        }
        packed = Pack(FORMAT, index.hash, index.classes, splits)
        with replacing(target / MANIFEST) as file:
            file.write(json.dumps(asdict(packed), indent=1).encode() + b"\n")
        (target / UNFINISHED).unlink()
    return packed


def shard_count(files: Files, shard_bytes: int) -> int:
    return min(len(files), max(1, -(-int(files.sizes.sum()) // shard_bytes)))


def earlier_shards(target: Path, plan: dict[str, Any]) -> dict[str, Shard]:
    """The shards that earlier attempts at `plan` made, by file. Raises UserError where `target` is of another plan."""
    if (target / MANIFEST).is_file():
        manifest = read_manifest(target)
        sizes = {split: len(manifest.splits[split].shards) for split in SPLITS.values()}
        begun, shards = {"format": manifest.format, "hash": manifest.hash, "shards": sizes}, manifest.shards
    elif is_packed(target):
        path = target / UNFINISHED
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
) -> Iterator[ShardToMake]:
    """Jobs are made one after another, because the names of a million files as Python strings would take 100 MB."""
    for (split, files), source in zip(index.splits.items(), layout.splits, strict=True):
        for number, chosen in enumerate(np.array_split(order(split, len(files)), counts[split])):
            file = f"{split}/{number:05d}-of-{counts[split]:05d}.tfrecord"
            images = tuple(
                (f"{index.classes[files.labels[i]]}/{files.name(i)}", int(files.labels[i]), int(files.sizes[i]))
                for i in chosen
            )
            yield ShardToMake(target, file, source, images, earlier.get(file))


def make_shard(job: ShardToMake) -> Shard:
    """The shard and its index on disk: those of an earlier attempt if their bytes are still the same, else new ones."""
    path = job.target / job.file
    if job.earlier is not None and intact(path, job.earlier):
        return job.earlier
    with reporting(f"cannot write {path}", WRITE_AGAIN):
        with replacing(path) as out:
            spans, size, digest = list[Span](), 0, hashlib.sha256()
            for (name, label, _), content in zip(job.images, _contents(job), strict=True):
                written = record(example_of(content, label, os.fsencode(name)))
                out.write(written)
                digest.update(written)
                spans.append((size, len(written)))
                size += len(written)
        with replacing(index_path(path)) as out:
            out.write(index_text(spans))
    return Shard(job.file, len(job.images), size, digest.hexdigest())


def intact(path: Path, expected: Shard) -> bool:
    try:
        if regular_size(path) != expected.bytes or sha256_of(path) != expected.sha256:
            return False
        spans = ((offset, len(payload) + FRAME) for offset, payload in walk(path) if isinstance(payload, bytes))
        return read_bytes(index_path(path), LARGEST_INDEX) == index_text(spans)
    except (OSError, ValueError):
        return False


def _contents(job: ShardToMake) -> Iterator[bytes]:
    """The images one after another, with no more than READ_AHEAD of them read before they are wanted."""
    ahead = deque[Future[bytes]]()
    with ThreadPoolExecutor(READ_AHEAD) as pool:
        for name, _, expected in job.images:
            ahead.append(pool.submit(_read, job.source / name, expected))
            if len(ahead) > READ_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _read(path: Path, expected: int) -> bytes:
    with reporting(f"cannot read {path}", "restore or remove it, then pack again"):
        content = path.read_bytes()
    if len(content) != expected:
        raise UserError(
            f"{path} has {len(content)} bytes, {expected} when the folders were indexed: "
            f"delete the index (.ddlbench in the images' folder), then pack again"
        )
    return content
