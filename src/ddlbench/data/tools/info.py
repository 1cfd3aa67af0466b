"""Describes a folder or file: image folders, a packed image set, or tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddlbench.data.images.index import Files, FolderLayout, prepare_index
from ddlbench.data.text.tokenfile import TokenFile
from ddlbench.data.tfrecord.packed import SPLITS, UNFINISHED, is_packed, read_manifest
from ddlbench.errors import UserError

Line = tuple[str, str]
KINDS = "image folders (train/<class>/*.JPEG, val/<class>/*.JPEG), a packed image set (pack.json), a token file (.bin)"


def kind(place: Path, layout: FolderLayout) -> str:
    """packed | tokens | folders. Raises UserError where `place` is none of them."""
    if is_packed(place):
        return "packed"
    if token_files(place):
        return "tokens"
    if any(split.is_dir() for split in layout.splits):
        return "folders"
    raise UserError(f"{place} {'is not' if place.exists() else 'does not exist: give'} one of: {KINDS}")


def token_files(place: Path) -> list[Path]:
    """`place` if it is a token file by its name, else the token files in that folder."""
    if place.suffix == ".bin":
        return [place]
    return [path for path in sorted(place.glob("*.bin")) if path.with_suffix(".json").is_file()]


def info(place: Path, layout: FolderLayout) -> list[Line]:
    describe = {"packed": packed_rows, "tokens": token_rows, "folders": lambda _: folder_rows(layout)}
    return list(describe[kind(place, layout)](place))


def folder_rows(layout: FolderLayout) -> Iterator[Line]:
    index = prepare_index(layout, None)
    yield "kind", "image folders"
    yield "classes", _classes(index.classes)
    for split, files in zip(SPLITS, (index.train, index.val), strict=True):
        yield split, _split(files)
    yield "hash", index.hash


def packed_rows(folder: Path) -> Iterator[Line]:
    pack = read_manifest(folder)
    yield "kind", f"packed image set, format {pack.format}"
    yield "classes", _classes(pack.classes)
    for split in SPLITS:
        part = pack.splits[split]
        yield split, f"{part.samples} images in {len(part.shards)} shards, {_bytes(part.bytes)}"
    yield "hash", pack.hash
    if (folder / UNFINISHED).is_file():
        yield "warning", "packing it again was started and not finished: pack it again"


def token_rows(place: Path) -> Iterator[Line]:
    for path in token_files(place):
        index = TokenFile.open(path).index
        yield "kind", f"token file {path.name}, format {index.format}"
        yield "tokens", f"{index.tokens} of {index.dtype}, {_bytes(path.stat().st_size)}"
        yield "text", f"{index.source}: {index.words} words, {index.lines} lines, {_bytes(index.source_bytes)}"
        yield "tokenizer", index.tokenizer
        yield "hash", index.sha256


def _classes(names: tuple[str, ...]) -> str:
    return f"{len(names)}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"


def _split(files: Files) -> str:
    return f"{len(files)} images, {_bytes(int(files.sizes.sum()))}"


def _bytes(count: int) -> str:
    return f"{count} bytes ({count / 1e6:.1f} MB)"
