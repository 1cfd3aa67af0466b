"""The work of ddlbench-data: packs image folders (tfrecord.py), and checks data sets. Both use several processes.

Packing resumes where an earlier attempt ended. pack.unfinished.jsonl describes the set until all shards are complete
and pack.json replaces it. A shard gets its final name when it is complete and on disk. The same folders give the same
bytes. Checking computes every checksum of every record and decodes every image. It repairs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

import numpy as np

from ddlbench.data import tfrecord
from ddlbench.data.home import SPLITS
from ddlbench.data.images.decoding import BadImage, decode_image
from ddlbench.data.images.index import Files, FolderLayout, Index, prepare_index
from ddlbench.data.processes import in_processes
from ddlbench.data.text.token_file import TokenFile, token_files
from ddlbench.data.tfrecord import FRAME, Pack, Shard, Span, crc32c, decode, encode, index_text, record, walk
from ddlbench.errors import UserError, reporting
from ddlbench.files import replace_json, replacing
from ddlbench.foreign import parse, read_bytes, sha256_of
from ddlbench.progress import Progress
from ddlbench.texts import shortened

WRITE_AGAIN = "free space or repair the disk, then run the command again; finished shards are kept"
READERS = 4  # images at once: a disk, and a parallel file system even more, is quicker with several than with one
READ_AHEAD = 32  # images
IMAGES_A_JOB = 256  # of a folder, when it is checked

Image = tuple[str, int, int]  # <class>/<name>, label, bytes


def pack(layout: FolderLayout, target: Path, shard_bytes: int, processes: int) -> Pack:
    """Pack image folders into `target`, in shards of about `shard_bytes`. Raises UserError for folders that cannot be
    used, a target that holds something else, and a full disk; Unavailable without google-crc32c."""
    crc32c()  # a missing library is reported before the work begins
    index = prepare_index(layout, None)
    counts = {split: shard_count(files, shard_bytes) for split, files in index.splits.items()}
    plan = {"format": tfrecord.FORMAT, "hash": index.hash, "shards": counts}
    total, progress = sum(counts.values()), Progress(enabled=True)
    processes = min(processes, total)
    with reporting(f"cannot write {target}", WRITE_AGAIN):
        check_target(target, plan)
        target.mkdir(parents=True, exist_ok=True)
        with replacing(target / tfrecord.UNFINISHED) as file:
            file.write(json.dumps(plan).encode())
        for split in counts:
            (target / split).mkdir(exist_ok=True)
        present = sum(len(list((target / split).glob("*.tfrecord"))) for split in counts)
        again = f"; {present} exist already and are checked" if present else ""
        progress.say(f"packing {total} shards into {target}, {processes} at a time{again}")
        shards = in_processes(call, _jobs(target, layout, index, counts), processes)
        made = sorted(progress.steps(shards, total, "packing, shard", "shards"), key=lambda shard: shard.file)
        parts = {split: tuple(shard for shard in made if shard.file.startswith(f"{split}/")) for split in counts}
        splits = {split: tfrecord.PackedSplit.of(shards) for split, shards in parts.items()}
        result = Pack(tfrecord.FORMAT, index.hash, index.classes, splits)
        replace_json(target / tfrecord.MANIFEST, asdict(result))
        (target / tfrecord.UNFINISHED).unlink(missing_ok=True)  # another process may pack the same
    return result


def shard_count(files: Files, shard_bytes: int) -> int:
    return min(len(files), max(1, -(-int(files.sizes.sum()) // shard_bytes)))


def check_target(target: Path, plan: dict[str, Any]) -> None:
    """Raises UserError where `target` has anything but what earlier attempts at `plan` made."""
    if (target / tfrecord.MANIFEST).is_file():
        manifest = tfrecord.read_manifest(target)
        sizes = {split: len(part.shards) for split, part in manifest.splits.items()}
        begun = {"format": manifest.format, "hash": manifest.hash, "shards": sizes}
    elif (path := target / tfrecord.UNFINISHED).is_file():
        try:
            begun = parse(read_bytes(path).partition(b"\n")[0])  # older versions added a line for each shard
        except ValueError as error:
            raise UserError(
                f"{path} is not what an earlier attempt leaves ({error}): delete it and pack again"
            ) from error
    elif target.exists() and any(not path.name.startswith(".") for path in target.iterdir()):
        raise UserError(f"{target} holds other files: give an empty or a new folder for the packed set")
    else:
        return
    if begun != plan:
        what = "these images in other shards" if begun.get("hash") == plan["hash"] else "a packed set of other images"
        odd = [key for key in plan if begun.get(key) != plan[key]]
        differences = ", ".join(f"{shortened(str(begun.get(key)), 80)} is not {plan[key]}" for key in odd)
        raise UserError(f"{target} holds {what} ({differences}): give another folder, or delete this one")


def _jobs(target: Path, layout: FolderLayout, index: Index, counts: dict[str, int]) -> Iterator[Callable[[], Shard]]:
    """Jobs are made one after another, because the names of a million files as Python strings would take 100 MB."""
    for (split, files), source in zip(index.splits.items(), layout.splits, strict=True):
        for number, chosen in enumerate(np.array_split(tfrecord.order(split, len(files)), counts[split])):
            file = f"{split}/{number:05d}-of-{counts[split]:05d}.tfrecord"
            images = [
                (f"{index.classes[files.labels[i]]}/{files.name(i)}", int(files.labels[i]), int(files.sizes[i]))
                for i in chosen
            ]
            yield partial(make_shard, target, file, source, images)


def make_shard(target: Path, file: str, source: Path, images: list[Image]) -> Shard:
    """A shard of set `target` and its index on disk: those of an earlier attempt if they are sound, else new ones. No
    more than READ_AHEAD images are in memory."""
    path = target / file
    if sound(path, images):
        return Shard(file, len(images), path.stat().st_size, sha256_of(path))
    with reporting(f"cannot write {path}", WRITE_AGAIN), ThreadPoolExecutor(READERS) as pool:
        with replacing(path) as out:
            spans, size, digest = list[Span](), 0, hashlib.sha256()
            for start in range(0, len(images), READ_AHEAD):
                part = images[start : start + READ_AHEAD]
                for (name, label, _), content in zip(part, pool.map(partial(_read, source), part), strict=True):
                    written = record(encode(label, content, os.fsencode(name)))
                    out.write(written)
                    digest.update(written)
                    spans.append((size, len(written)))
                    size += len(written)
        with replacing(path.with_suffix(".idx")) as out:
            out.write(index_text(spans))
    return Shard(file, len(images), size, digest.hexdigest())


def sound(path: Path, images: list[Image]) -> bool:
    """Whether a shard has these images, every checksum of its records is right, and its index fits."""
    spans, read = list[Span](), list[Image]()
    try:
        for offset, _, payload in walk(path):
            if isinstance(payload, str):
                return False
            label, name, (start, end) = decode(memoryview(payload), 0, len(payload))
            read.append((os.fsdecode(name), label, end - start))
            spans.append((offset, len(payload) + FRAME))
        return read == images and read_bytes(path.with_suffix(".idx"), tfrecord.LARGEST_INDEX) == index_text(spans)
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


@dataclass(frozen=True)
class Findings:
    """Faults of a part of a set. counts: samples by (split, class); faults: a line each, with file and offset."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    faults: list[str] = field(default_factory=list[str])


def verify_pack(folder: Path, processes: int) -> Iterator[Findings]:
    """Check all shards, in the order in which they finish. Raises UserError where pack.json cannot be used."""
    crc32c()  # a missing library is reported before the work begins
    pack = tfrecord.read_manifest(folder)
    present = {f"{split}/{path.name}" for split in SPLITS.values() for path in (folder / split).glob("*.tfrecord")}
    odd = sorted(present - {shard.file for shard in pack.shards})
    yield Findings(faults=[f"{folder / file}: not in the list of {tfrecord.MANIFEST}" for file in odd])
    jobs = (partial(verify_shard, folder, shard, pack.classes) for shard in pack.shards)
    findings = in_processes(call, jobs, processes)
    yield from Progress(enabled=True).steps(findings, len(pack.shards), "verifying, shard", "shards")


def verify_folders(layout: FolderLayout, processes: int) -> Iterator[Findings]:
    """Check IMAGES_A_JOB images at a time. Raises UserError where the folders cannot be used."""
    index = prepare_index(layout, None)
    parts = [
        (split, folder, files, range(len(files))[start : start + IMAGES_A_JOB])
        for (split, files), folder in zip(index.splits.items(), layout.splits, strict=True)
        for start in range(0, len(files), IMAGES_A_JOB)
    ]
    jobs = (
        partial(verify_images, folder, split, [(index.classes[files.labels[i]], files.name(i)) for i in images])
        for split, folder, files, images in parts
    )
    findings = in_processes(call, jobs, processes)
    yield from Progress(enabled=True).steps(findings, len(parts), f"verifying, {IMAGES_A_JOB} images", "parts")


def verify_images(folder: Path, split: str, images: Sequence[tuple[str, str]]) -> Findings:
    """images: (name of the class, name of the file) in folder/."""
    findings = Findings()
    for label, name in images:
        path = folder / label / name
        try:
            fault = image_fault(path.read_bytes())
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        findings.counts[split, label] += 1
        if fault:
            findings.faults.append(f"{path}: {fault}")
    return findings


def verify_shard(folder: Path, shard: Shard, classes: tuple[str, ...]) -> Findings:
    """Check every record, up to one whose length is damaged; an unreadable file is one fault. The index is compared
    where all lengths are right, the shard's checksum where all records' checksums are."""
    findings, path = Findings(), folder / shard.file
    faults, index_file = findings.faults, path.with_suffix(".idx")
    try:
        size, spans, bad = path.stat().st_size, list[Span](), False
        end: int | None = 0
        for offset, end, read in walk(path):
            if isinstance(read, bytes):
                wrong = _record_faults(read, path.parent.name, classes, findings)
            else:
                bad = True
                wrong = [read if end else f"{read}; the last {size - offset} bytes of the file cannot be checked"]
            faults.extend(f"{path}, offset {offset}: {fault}" for fault in wrong)
            spans.append((offset, (end or size) - offset))
        try:
            index = tfrecord.index_of(path)
            if end is not None and index != spans:
                faults.append(f"{index_file} is stale: it has {len(index)} records, the shard {len(spans)}, or others")
            elif end is not None and read_bytes(index_file, tfrecord.LARGEST_INDEX) != index_text(spans):
                faults.append(f"{index_file} differs in form from what tfrecord2idx writes")
        except UserError as error:
            faults.append(str(error))
        # A shard without faults may not be the one that was packed.
        if size != shard.bytes or (not bad and len(spans) != shard.samples):
            says = f"{tfrecord.MANIFEST} says {shard.samples} and {shard.bytes}"
            faults.append(f"{path}: {len(spans)} records, {size} bytes; {says}")
        elif not bad and sha256_of(path) != shard.sha256:
            faults.append(f"{path}: its sha256 differs from the one in {tfrecord.MANIFEST}: it is another shard")
    except OSError as error:
        faults.append(f"{path}: cannot be read ({error.strerror})")
    return findings


def _record_faults(payload: bytes, split: str, classes: tuple[str, ...], findings: Findings) -> Iterator[str]:
    """What is wrong with a record whose checksums are right."""
    try:
        number, name, (start, end) = decode(memoryview(payload), 0, len(payload))
    except ValueError as error:
        yield f"not an image's tf.train.Example ({error})"
        return
    filename = os.fsdecode(name)
    if not number < len(classes):
        yield f"{filename} has label {number}, there are {len(classes)} classes"
        return
    label = classes[number]
    findings.counts[split, label] += 1
    if not filename.startswith(f"{label}/"):
        yield f"{filename} has the label of class {label}"
    if fault := image_fault(payload[start:end]):
        yield f"{filename} {fault}"


def image_fault(content: bytes | memoryview) -> str | None:
    """Why the bytes cannot be decoded to a complete image; None where they can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decode_image(content, "pil")
    except BadImage as reason:
        return f"cannot be decoded ({reason})"
    return None


def verify_tokens(place: Path) -> Iterator[Findings]:
    """The size and the bytes of every token file against its index."""
    for path in token_files(place):
        index = path.with_suffix(".json").name
        try:
            tokens = TokenFile.open(path)
        except UserError as error:
            yield Findings(faults=[str(error)])
            continue
        faults = [] if sha256_of(path) == tokens.index.sha256 else [f"{path}: its sha256 is not the one in {index}"]
        if not faults and tokens.index.tokens and (largest := int(tokens.read().max())) >= tokens.index.vocab_size:
            faults.append(f"{path}: it has token {largest}, the vocabulary in {index} {tokens.index.vocab_size}")
        yield Findings(faults=faults)
