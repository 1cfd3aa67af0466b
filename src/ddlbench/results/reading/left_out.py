"""Counts of the attempts, files and folders that are not in the numbers: one line for the terminal and the page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from errno import ELOOP
from typing import Any

from ddlbench.foreign import ForeignError, NotRegularError, TooLargeError
from ddlbench.record.schema import SCHEMA_VERSION

CIRCLE = "a link in a circle"
BROKEN_EPOCHS = "epochs.jsonl that cannot be read whole"
NO_CONFIGURATION = "without a configuration"
NO_RATE = "ended ok without a rate"
# The kinds in the order of the line: each for one and for several.
KINDS = {
    "unreadable": "unreadable",
    "not JSON of a run": "not JSON of a run",
    "no regular file": "no regular files",
    "too large": "too large",
    CIRCLE: "links in circles",
    "of a newer schema": "of a newer schema",
    "of an older schema": "of an older schema",
    "folder or link that cannot be followed": "folders or links that cannot be followed",
    "copy": "copies",
    NO_CONFIGURATION: NO_CONFIGURATION,
    NO_RATE: NO_RATE,
    "still running or killed": "still running or killed",
    BROKEN_EPOCHS: BROKEN_EPOCHS,
    "of ranks that shared a GPU": "of ranks that shared a GPU",
}


def line(kinds: Iterable[str]) -> str | None:
    """ "left out: 3 unreadable, 1 of a newer schema, 2 copies"; None if nothing is left out."""
    counts = Counter(kinds)
    parts = [f"{counts[one]} {one if counts[one] == 1 else several}" for one, several in KINDS.items() if counts[one]]
    return f"left out: {', '.join(parts)}" if parts else None


def of_error(error: Exception) -> str:
    """The kind of a file that could not be read."""
    if isinstance(error, NotRegularError):
        return "no regular file"
    if isinstance(error, TooLargeError):
        return "too large"
    if isinstance(error, ForeignError):
        return "not JSON of a run"
    if isinstance(error, OSError):
        return CIRCLE if error.errno == ELOOP else "unreadable"
    return "unreadable"


def of_version(version: Any) -> str:
    """The kind of a record whose schema version is not read."""
    if type(version) is not int:
        return "not JSON of a run"
    return "of a newer schema" if version > SCHEMA_VERSION else "of an older schema"


def of_reason(reason: str) -> str:
    """The kind of a folder or link that the search could not follow."""
    return CIRCLE if reason == os.strerror(ELOOP) else "folder or link that cannot be followed"
