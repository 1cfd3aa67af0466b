"""Texts of records from other people as cells of tables: none that a spreadsheet runs, columns that are aligned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

# What a spreadsheet runs begins with one of them; the last four are full-width = + - @.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")


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
