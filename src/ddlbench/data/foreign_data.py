"""Files of data sets, which come from other people: regular files alone, JSON of a bounded size, fields of their
types."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

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


def read_json(path: Path) -> Any:
    """OSError where the file cannot be read, ValueError where it is no JSON."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def format_of(content: Any) -> int | str | None:
    """The number of a file's format, another value as a short text; None where it has none."""
    found = cast(Mapping[str, Any], content).get("format") if isinstance(content, dict) else None
    return found if found is None or type(found) is int else shortened(str(found), 40)


def made_of(kind: type[Made], content: object) -> Made:
    """A dataclass of texts and of whole numbers from 0 to 2^63 - 1, from a JSON object of the same keys.
    ValueError for another object."""
    expected = {field.name: TYPES[str(field.type)] for field in fields(cast(Any, kind))}
    found = cast(Mapping[str, object], content) if isinstance(content, dict) else {}
    if odd := sorted(map(ascii, found.keys() ^ expected.keys())):
        raise ValueError(f"its keys differ from those expected in {', '.join(odd[:3])}")
    for name, value in found.items():
        if type(value) is not expected[name] or (isinstance(value, int) and not 0 <= value < 2**63):
            raise ValueError(f"{name} is {str(value)[:40]!a}")
    return kind(**cast(Any, found))
