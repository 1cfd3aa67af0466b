"""Checks a data set: every checksum of every record, and every image is decoded. Nothing is repaired."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import call
from pathlib import Path

from ddlbench.data import tfrecord
from ddlbench.data.home import SPLITS
from ddlbench.data.images.decoding import BadImage, decode_image
from ddlbench.data.images.index import FolderLayout, prepare_index
from ddlbench.data.processes import in_processes
from ddlbench.data.text.token_file import TokenFile, token_files
from ddlbench.data.tfrecord import FRAME, Shard, Span, crc32c, decode, index_text, walk
from ddlbench.errors import UserError
from ddlbench.foreign import read_bytes, sha256_of
from ddlbench.progress import Progress

IMAGES_A_JOB = 256  # of a folder


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
    odd = present - {shard.file for shard in pack.shards}
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
    faults, index_file = findings.faults, tfrecord.index_path(path)
    try:
        size, spans, bad = path.stat().st_size, list[Span](), False
        end: int | None = 0
        for offset, read in walk(path):
            if isinstance(read, bytes):
                end = offset + len(read) + FRAME
                wrong = _record(read, path.parent.name, classes, findings)
                faults.extend(f"{path}, offset {offset}: {fault}" for fault in wrong)
            else:
                bad, end = True, read.next
                lost = "" if end else f"; the last {size - offset} bytes of the file cannot be checked"
                faults.append(f"{path}, offset {offset}: {read.what}{lost}")
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


def _record(payload: bytes, split: str, classes: tuple[str, ...], findings: Findings) -> Iterator[str]:
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
    """The bytes of every token file against its index. Raises UserError where an index or a size is wrong."""
    for path in token_files(place):
        tokens, index = TokenFile.open(path), path.with_suffix(".json").name
        faults = [] if sha256_of(path) == tokens.index.sha256 else [f"{path}: its sha256 is not the one in {index}"]
        if not faults and tokens.index.tokens and (largest := int(tokens.read().max())) >= tokens.index.vocab_size:
            faults.append(f"{path}: it has token {largest}, the vocabulary in {index} {tokens.index.vocab_size}")
        yield Findings(faults=faults)
