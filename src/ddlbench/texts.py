"""Texts from other people that are safe to print (no control characters, no surrogates, a bounded length) or to open in
a spreadsheet; numbers with few digits; lists and tables for the terminal; hashes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")

MIB, GIB = 2**20, 2**30
# A spreadsheet runs a cell that begins with one of these; the last four are full-width = + - @.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def printable(text: str) -> str:
    """The text with every character that does not print as itself written as an escape: ESC becomes "\\x1b"."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def say(*lines: object, stream: TextIO | None = None) -> None:
    """Print lines at once. Characters that do not print, or that the encoding of the terminal lacks, become escapes. If
    a reader such as `head` has closed its pipe, the work goes on. stream: None: stdout"""
    terminal = stream or sys.stdout
    encoding = terminal.encoding or "utf-8"
    text = "".join(f"{printable(str(line))}\n" for line in lines)
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", file=terminal, flush=True)
    except BrokenPipeError:
        discard(terminal)


def discard(stream: TextIO) -> None:
    """From now on nothing reads what is written to a stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def clipped(text: str, longest: int, ellipsis: str = "…") -> str:
    """At most `longest` letters, with `ellipsis` in place of the others. It stands at the end, inside a bracket that
    ends the text, "zero2 (fused=tr…)@4", or before a word in brackets, "MPT-125m (124… (published)"."""
    if len(text) <= longest:
        return text
    bracket = re.search(r"( \([a-z]{1,12}\)|\)[^()]{0,9})$", text)
    tail = bracket[0] if bracket else ""
    head = text[: max(0, longest - len(ellipsis) - len(tail))]
    return f"{head}{ellipsis}{tail}" if "(" in head + tail else text[: longest - len(ellipsis)] + ellipsis


def shortened(text: str, longest: int) -> str:
    """`clipped`, with a hash of the whole text, so that different texts stay different."""
    return clipped(text, longest, "…" + hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8])


def first_line(said: BaseException | str) -> str:
    """The first line of a library's error or a program's output that is not empty; without one, the error's name."""
    nothing = "no message" if isinstance(said, str) else type(said).__name__
    return next((line.strip() for line in str(said).splitlines() if line.strip()), nothing)


def digest(value: Any, letters: int = 8) -> str:
    """A short hash of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:letters]


def bytes_text(bytes_: float) -> str:
    """MiB, or from 1024 MiB on GiB, with four digits."""
    return f"{bytes_ / MIB:.4g} MiB" if bytes_ < GIB else f"{bytes_ / GIB:.4g} GiB"


def counted(count: int, thing: str) -> str:
    """ "1 GPU", "4 GPUs"."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def limited(items: Sequence[Item], limit: int) -> tuple[Sequence[Item], int]:
    """The first items, and the number of the others."""
    return items[:limit], max(0, len(items) - limit)


def first_few(items: Sequence[Item], limit: int, more: str = "more", text: Callable[[Item], str] = str) -> list[str]:
    """The first items as texts, and "and 3 more" where there are others."""
    first, others = limited(items, limit)
    return [*map(text, first), *([f"and {others} {more}"] if others else [])]


def quoted(text: str) -> str:
    """The text as a cell of a CSV file: one that a spreadsheet would run as a formula begins with a '."""
    return f"'{text}" if text.startswith(FORMULA) else text


def aligned(headers: Sequence[str], lines: Iterable[Sequence[str]], left: Collection[str] | None = None) -> list[str]:
    """A table: headers, a rule, lines. left: the headers of left-aligned columns; None: all"""
    rows = [headers, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    pads = [str.ljust if left is None or header in left else str.rjust for header in headers]
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip() for row in rows
    ]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in GitHub's Markdown."""
    first, *lines = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *lines]) + "\n"


def _or_empty(text: Callable[[float], str]) -> Callable[[float | None], str]:
    """The text of a number, or "" for None."""
    return lambda value: "" if value is None else text(value)


@_or_empty
def seconds(value: float) -> str:
    """A time with three significant digits or one decimal: "123.4 s", "1.23 s", "0.0123 s"."""
    return f"{value:,.1f} s" if value >= 10 else f"{value:#.3g} s"


@_or_empty
def number(value: float) -> str:
    """A rate: "12,345", "123.4", "1.23"."""
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 10 else f"{value:#.3g}"


percent = _or_empty(lambda share: f"{100 * share:.1f} %")
signed = _or_empty(lambda share: f"{100 * share:+.1f} %")
ratio = _or_empty("{:.2f}".format)
gib = _or_empty(lambda bytes_: f"{bytes_ / GIB:.2f} GiB")
