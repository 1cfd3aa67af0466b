"""Numbers and texts as cells of tables: digits for reading, nothing that a spreadsheet runs, aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ddlbench.texts import GIB

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


def seconds(value: float | None) -> str:
    """A time with the digits it deserves: "123.4 s", "1.23 s", "0.0123 s"."""
    if value is None:
        return ""
    return f"{value:,.1f} s" if value >= 10 else f"{value:#.3g} s"


def number(value: float | None) -> str:
    """A rate: "12,345", "123.4", "1.23"."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:#.3g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def signed(value: float | None) -> str:
    """A share with its sign."""
    return "" if value is None else f"{100 * value:+.1f} %"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def gib(value: float | None) -> str:
    return "" if value is None else f"{value / GIB:.2f} GiB"
