"""Files of data sets, which come from other people: regular files alone, JSON of a bounded size, fields of their
types."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

from ddlbench.errors import UserError
from ddlbench.foreign import open_regular, read_bytes
from ddlbench.texts import shortened

Made = TypeVar("Made")
TYPES = {"int": int, "str": str}


def regular_size(path: Path) -> int | None:
    """Bytes of a regular file; None where there is none that can be reached."""
    try:
        with open_regular(path) as file:
            return file.seek(0, 2)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None


def sha256_of(path: Path) -> str:
    """In hexadecimal, of a regular file of any size."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_format(path: Path, number: int, remedy: str) -> dict[str, Any]:
    """A JSON object whose "format" is `number`. OSError where the file cannot be read, UserError for other content."""
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): {remedy}") from error
    version = cast(dict[str, Any], content).get("format") if isinstance(content, dict) else None
    if type(version) is not int or version != number:
        raise UserError(f"{path} has format {shortened(str(version), 40)}, this version reads {number}: {remedy}")
    return content


def from_json(kind: type[Made], content: object) -> Made:
    """A dataclass of texts and of whole numbers from 0 to 2^63 - 1, from a JSON object of the same keys.
    ValueError for another object."""
    expected = {field.name: TYPES[str(field.type)] for field in fields(cast(Any, kind))}
    entries = cast(Mapping[str, object], content) if isinstance(content, dict) else {}
    if odd := sorted(map(ascii, entries.keys() ^ expected.keys())):
        raise ValueError(f"its keys differ from those expected in {', '.join(odd[:3])}")
    for name, value in entries.items():
        if type(value) is not expected[name] or (isinstance(value, int) and not 0 <= value < 2**63):
            raise ValueError(f"{name} is {str(value)[:40]!a}")
    return kind(**cast(Any, entries))
