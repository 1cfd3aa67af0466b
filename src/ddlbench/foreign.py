"""Files from other people: only regular files are read, none waits for a writer, JSON has a bounded size and depth."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from io import BufferedReader
from pathlib import Path
from sys import intern
from typing import Any, TypeVar, cast

from ddlbench.errors import UserError
from ddlbench.texts import MIB, printable, shortened

Object = dict[str, Any]  # of JSON
Made = TypeVar("Made")

LARGEST_BYTES = 32 * MIB  # of a file: 1,000 times a usual run.json, epochs.jsonl of 30,000 epochs
DEEPEST = 50  # levels of nesting: 10 times those of a usual record
TYPES = {"int": int, "str": str}


class NotRegularError(OSError):
    """A pipe, a folder, a device."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(path))


class TooLargeError(UserError):
    """More bytes than are read."""


class ForeignError(UserError):
    """JSON, but of no run."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it. OSError where it cannot be opened, NotRegularError for what is no regular file: a pipe
    without a writer would block."""
    if not path.is_file():  # before it is opened: opening a device may already do something
        path.stat()
        raise NotRegularError(path)
    return path.open("rb")


def read_bytes(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """A file's content. OSError where it cannot be read; UserError where it is larger than `largest` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= largest else b""  # a read reserves memory for all that it may get
        if len(content) > size:  # the file grows, or its file system does not say its size
            content += file.read(largest + 1 - len(content))
    if max(size, len(content)) > largest:
        raise TooLargeError(f"it has {max(size, len(content)):,} bytes, more than the {largest:,} that are read")
    return content


def parse(content: bytes) -> Object:
    """A JSON object, its texts printable. UserError or another ValueError where it is none."""
    try:
        value = _plain(json.loads(content.decode()))
    except RecursionError:
        raise UserError(f"it is nested more than {DEEPEST} levels deep") from None
    if not isinstance(value, dict):
        raise ForeignError("not a JSON object")
    return cast(Object, value)


def section(record: Mapping[str, Any], key: str) -> Object:
    """A section of a record; empty if it is missing, or no JSON object."""
    value = record.get(key)
    return cast(Object, value) if isinstance(value, dict) else {}


def _plain(value: Any, depth: int = 0) -> Any:
    """The value with printable texts. Equal texts are one object, because records share keys and most of their values.
    RecursionError where it is nested too deep."""
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, str):
        return intern(printable(value))
    if isinstance(value, dict):
        return {intern(printable(key)): _plain(item, depth + 1) for key, item in cast(Object, value).items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in cast(list[Any], value)]
    return value


def regular_size(path: Path) -> int | None:
    """Bytes of a regular file; None where there is none that can be reached."""
    try:
        with open_regular(path) as file:
            return file.seek(0, 2)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None


def sha256_of(path: Path) -> str:
    """The hash of a regular file of any size, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_format(path: Path, number: int, remedy: str) -> Object:
    """A JSON object whose "format" is `number`. OSError where the file cannot be read, UserError for other content."""
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): {remedy}") from error
    version = cast(Object, content).get("format") if isinstance(content, dict) else None
    if type(version) is not int or version != number:
        raise UserError(f"{path} has format {shortened(str(version), 40)}, this version reads {number}: {remedy}")
    return content


def from_json(kind: type[Made], content: object) -> Made:
    """A dataclass of texts and of whole numbers from 0 to 2^63 - 1, made of a JSON object with the same keys.
    ValueError for another object."""
    expected = {field.name: TYPES[str(field.type)] for field in fields(cast(Any, kind))}
    entries = cast(Mapping[str, object], content) if isinstance(content, dict) else {}
    if odd := sorted(map(ascii, entries.keys() ^ expected.keys())):
        raise ValueError(f"its keys differ from those expected in {', '.join(odd[:3])}")
    for name, value in entries.items():
        if type(value) is not expected[name] or (isinstance(value, int) and not 0 <= value < 2**63):
            raise ValueError(f"{name} is {str(value)[:40]!a}")
    return kind(**cast(Any, entries))
