"""The folders of attempts: every folder named attempt-* below the folders of results, through symbolic links too;
and the files of published measurements."""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

WITHOUT_END = 10**9
ATTEMPT = re.compile("attempt-[0-9]+")
PUBLISHED_FILE = "published.jsonl"
BELOW_LINKS = 3  # levels below a linked folder: results, their runs, the attempts. A link to / must end, too.


@dataclass
class Search:
    """The result of a search.

    attempts:   by their real path, as they were reached first; real folders before links
    unreadable: folders and links that cannot be followed, with the reason
    published:  files of published measurements
    """

    attempts: dict[str, Path] = field(default_factory=dict[str, Path])
    unreadable: dict[Path, str] = field(default_factory=dict[Path, str])
    published: list[Path] = field(default_factory=list[Path])


def search(folders: Sequence[Path]) -> Search:
    """All attempts at or below the folders, each once, also if links form circles."""
    result, seen = Search(), set[str]()
    real, linked = deque((folder, WITHOUT_END) for folder in folders), deque[tuple[Path, int]]()
    while real or linked:
        (folder, levels), waiting = (real.popleft(), real) if real else (linked.popleft(), linked)
        place = os.path.realpath(folder)
        if place in seen:
            continue
        seen.add(place)
        if folder.name.startswith("attempt-") or Path(place).name.startswith("attempt-"):
            result.attempts[place] = folder
        if not levels:
            continue
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            result.unreadable[folder] = error.strerror or str(error)
            continue
        for entry in entries:
            path = folder / entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((path, levels - 1))
                elif entry.is_symlink() and stat.S_ISDIR(path.stat().st_mode):
                    linked.append((path, min(levels - 1, BELOW_LINKS)))
                elif ATTEMPT.fullmatch(entry.name):
                    result.unreadable[path] = "it is not a folder"
                elif entry.name == PUBLISHED_FILE:
                    result.published.append(path)
            except OSError as error:
                result.unreadable[path] = error.strerror or str(error)
    return result
