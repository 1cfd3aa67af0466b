"""Counts of the attempts, files and folders that are not in the numbers: one line for the terminal and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum


class LeftOut(StrEnum):
    """Why something is not in the numbers, in the order of the line."""

    UNREADABLE = "unreadable"
    NO_RUN = "not JSON of a run"
    NOT_REGULAR = "no regular file"
    TOO_LARGE = "too large"
    CIRCLE = "a link in a circle"
    NEWER = "of a newer schema"
    OLDER = "of an older schema"
    NOT_FOLLOWED = "folder or link that cannot be followed"
    COPY = "copy"
    NO_CONFIGURATION = "without a configuration"
    NO_RATE = "ended ok without a rate"
    RUNNING = "still running or killed"
    BROKEN_EPOCHS = "epochs.jsonl that cannot be read whole"
    SHARED_GPU = "of ranks that shared a GPU"


SEVERAL = {
    LeftOut.NOT_REGULAR: "no regular files",
    LeftOut.CIRCLE: "links in circles",
    LeftOut.NOT_FOLLOWED: "folders or links that cannot be followed",
    LeftOut.COPY: "copies",
}


def line(kinds: Iterable[str]) -> str | None:
    """ "left out: 3 unreadable, 1 of a newer schema, 2 copies"; None if nothing is left out."""
    counts = Counter(kinds)
    parts = [
        f"{counts[kind]} {kind if counts[kind] == 1 else SEVERAL.get(kind, kind)}" for kind in LeftOut if counts[kind]
    ]
    return f"left out: {', '.join(parts)}" if parts else None
