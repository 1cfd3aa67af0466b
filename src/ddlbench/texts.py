"""Texts from other people, made safe to print (no control characters, no surrogates, a bounded length), and hashes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

MIB, GIB = 2**20, 2**30


def printable(text: str) -> str:
    """The text with every character that does not print as itself written as an escape: ESC becomes "\\x1b"."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def shortened(text: str, longest: int) -> str:
    """At most `longest` letters. A shortened text ends with a hash of the whole text, so that different texts stay
    different."""
    if len(text) <= longest:
        return text
    end = "…" + hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8]
    return text[: longest - len(end)] + end


def digest(value: Any, letters: int = 8) -> str:
    """A short hash of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:letters]


def bytes_text(bytes_: float) -> str:
    """In MiB, or from 1024 of them on in GiB: four digits."""
    return f"{bytes_ / MIB:.4g} MiB" if bytes_ < GIB else f"{bytes_ / GIB:.4g} GiB"


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
