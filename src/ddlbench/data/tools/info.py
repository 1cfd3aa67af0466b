"""Describes a folder or file: image folders, a packed image set, or tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddlbench.data.images.index import Files, FolderLayout, prepare_index
from ddlbench.data.text.token_file import TokenFile
from ddlbench.data.tfrecord.packed import UNFINISHED, Pack, is_packed, read_manifest
from ddlbench.errors import UserError

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


def info(place: Path, layout: FolderLayout) -> Iterator[tuple[str, str]]:
    """Lines of a name and a value."""
    found = kind(place, layout)
    if found == "tokens":
        for path in token_files(place):
            index = TokenFile.open(path).index
            yield "kind", f"token file {path.name}, format {index.format}"
            yield "tokens", f"{index.tokens} of {index.dtype}, {_bytes(path.stat().st_size)}"
            yield "text", f"{index.source}: {index.words} words, {index.lines} lines, {_bytes(index.source_bytes)}"
            yield "tokenizer", index.tokenizer
            yield "hash", index.sha256
        return
    images = read_manifest(place) if found == "packed" else prepare_index(layout, None)
    yield "kind", f"packed image set, format {images.format}" if isinstance(images, Pack) else "image folders"
    yield "classes", f"{len(images.classes)}: {', '.join(images.classes[:10])}{', ...' * (len(images.classes) > 10)}"
    for split, part in images.splits.items():
        if isinstance(part, Files):
            yield split, f"{len(part)} images, {_bytes(int(part.sizes.sum()))}"
        else:
            yield split, f"{part.samples} images in {len(part.shards)} shards, {_bytes(part.bytes)}"
    yield "hash", images.hash
    if found == "packed" and (place / UNFINISHED).is_file():
        yield "warning", "packing it again was started and not finished: pack it again"


def _bytes(count: int) -> str:
    return f"{count} bytes ({count / 1e6:.1f} MB)"
