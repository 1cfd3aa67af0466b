"""Texts of records from other people, made safe to print: no control characters, no surrogates, a bounded length."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

# What a spreadsheet runs begins with one of them; the last four are full-width = + - @.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")


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
    mark = "…" + hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8]
    return text[: longest - len(mark)] + mark


def quoted(text: str) -> str:
    """The text as a cell of a CSV file, with a ' before what a spreadsheet would run as a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text


def aligned(headers: Sequence[str], lines: Iterable[Sequence[str]], left: Collection[str] | None = None) -> list[str]:
    """A table: headers, a rule, lines. left: headers of columns that are aligned to the left; None: all"""
    rows = [headers, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    pads = [str.ljust if left is None or header in left else str.rjust for header in headers]
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip() for row in rows
    ]


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
