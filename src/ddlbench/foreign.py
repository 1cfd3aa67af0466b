"""JSON in files from other people: regular files of a bounded size only, read without waiting for a writer."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from sys import intern
from typing import Any, cast

from ddlbench.errors import UserError
from ddlbench.texts import MIB, printable

Object = dict[str, Any]  # of JSON

LARGEST_BYTES = 32 * MIB  # of a file: 1,000 times a usual run.json, epochs.jsonl of 30,000 epochs
DEEPEST = 50  # levels of nesting: 10 times those of a usual record


class NotRegularError(OSError):
    """A pipe, a folder, a device."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(path))


class TooLargeError(UserError):
    """More bytes than are read."""


class ForeignError(UserError):
    """JSON, but of no run."""


def open_regular(path: Path) -> BufferedReader:
    """A file to be read. OSError where it cannot be opened, NotRegularError for what is no regular file: a pipe without
    a writer would block."""
    if not path.is_file():  # before it is opened: opening a device may already do something
        path.stat()
        raise NotRegularError(path)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(path)
    return file


def read_bytes(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """A file's content. OSError where it cannot be read; UserError where it is larger than `largest` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= largest else b""
        if len(content) > size:  # it grows, or its system does not say its size
            content += file.read(largest + 1 - len(content))
    if max(size, len(content)) > largest:
        raise TooLargeError(f"it has {max(size, len(content)):,} bytes, more than the {largest:,} that are read")
    return content


def parse(content: bytes) -> Object:
    """A JSON object, its texts printable. UserError or another ValueError where it is none."""
    try:
        value = json.loads(content.decode())
        # Where every text prints as it is: control characters are not JSON, but as escapes.
        if content.isascii() and b"\\" not in content and b"\x7f" not in content:
            _bounded([value])
        else:
            value = _plain(value)
    except RecursionError:
        raise UserError(f"it is nested more than {DEEPEST} levels deep") from None
    if not isinstance(value, dict):
        raise ForeignError("not a JSON object")
    return cast(Object, value)


def _bounded(value: Any, levels: int = DEEPEST + 1) -> None:
    """RecursionError where a list or object has values in more levels."""
    for item in cast(Object, value).values() if isinstance(value, dict) else cast(list[Any], value):
        if levels == 0:
            raise RecursionError
        if isinstance(item, dict | list):
            _bounded(item, levels - 1)


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_text(key): _plain(item, depth + 1) for key, item in cast(Object, value).items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in cast(list[Any], value)]
    return value


def _text(text: str) -> str:
    """Records share their keys and most of their values."""
    return intern(printable(text))
