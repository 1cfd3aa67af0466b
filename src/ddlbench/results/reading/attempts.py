"""Search for the folders of attempts, and read them. A record that cannot be read becomes an attempt with a reason.

Each line of published.jsonl is the record of a measurement that others published: the sections of run.json, as far as
the source states them, the epochs, and a section `published` with the source and its address. It becomes a row of the
same tables, but never a repeat or a base of a run of this program (docs/adr/0023).
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from errno import ELOOP, ENOTDIR
from pathlib import Path
from typing import Any, NamedTuple, cast

from ddlbench.errors import UserError, reporting
from ddlbench.foreign import ForeignError, NotRegularError, Object, TooLargeError, parse, read_bytes, section
from ddlbench.record.files import find_killed
from ddlbench.record.schema import READ_VERSIONS, SCHEMA_VERSION
from ddlbench.results.rows import PUBLISHED
from ddlbench.texts import digest, printable, shortened

READS = " and ".join(map(str, READ_VERSIONS))
MOST_LINES = 200_000  # of epochs.jsonl: each line becomes a row, however short it is
REASON = 300  # letters of a reason: an error may quote what it cannot read
PUBLISHED_FILE = "published.jsonl"
WITHOUT_END = 10**9
BELOW_LINKS = 3  # levels below a linked folder: results, their runs, the attempts. A search below a link to / must end.


class LeftOut(StrEnum):
    """Why something is not in the numbers, in the order of `Merged.left_out`."""

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
_KINDS: dict[type[Exception], LeftOut] = {  # of a file that could not be read
    NotRegularError: LeftOut.NOT_REGULAR,
    TooLargeError: LeftOut.TOO_LARGE,
    ForeignError: LeftOut.NO_RUN,
}


class Note(NamedTuple):
    """What is not in the numbers, or not completely. kind: of LeftOut; None: it is not counted"""

    text: str
    kind: str | None = None


@dataclass(frozen=True)
class Attempt:
    """One attempt's files, or a published measurement. If run.json is unreadable, only the folder's name is available.
    The epochs are read when they are asked for, because those of many attempts would fill the memory.

    path:    the folder; for a published measurement the file, a colon, and the number of the line
    record:  run.json, or the line
    notes:   why the record could not be used
    has_end: whether the record itself says how the run ended
    """

    path: Path
    record: Object
    notes: tuple[Note, ...] = ()
    has_end: bool = True

    @property
    def name(self) -> str:
        """The folder, as it can be printed."""
        return printable(str(self.path))

    @property
    def identity(self) -> Hashable:
        """Equal for copies of one attempt: a hash of run_id, attempt and start. For an unreadable record it is the
        path; a record without a start is compared completely."""
        record = self.record
        if record["status"] == "unreadable":
            return self.path
        start = section(record, "times").get("start")
        return digest([record.get("run_id"), record.get("attempt"), start] if start else [record, self.epochs])

    @property
    def epochs(self) -> list[Object]:
        """Lines of epochs.jsonl."""
        return self.read_epochs()[0]

    def read_epochs(self) -> tuple[list[Object], list[Note]]:
        """The lines of epochs.jsonl, and a note if it or some of its lines cannot be read; neither if run.json is
        unreadable. The record of a published measurement has its epochs itself."""
        file = self.path / "epochs.jsonl"
        if self.record.get("origin") == PUBLISHED:
            values = self.record.get("epochs")
            values = cast(list[Any], values) if isinstance(values, list) else []
            lines = [value for value in values if isinstance(value, dict)]
            broken = len(values) - len(lines)
        elif self.record["status"] == "unreadable" or not os.path.lexists(file):
            return [], []
        else:
            try:
                content = read_bytes(file)
                if (count := content.count(b"\n")) > MOST_LINES:
                    raise TooLargeError(f"it has {count:,} lines, more than the {MOST_LINES:,} that are read")
            except (OSError, ValueError) as error:
                text = f"{self.name}: epochs.jsonl cannot be read ({reason_of(error)}) and is left out"
                return [], [Note(text, LeftOut.BROKEN_EPOCHS)]
            lines, broken = lines_of(content)
        text = f"{self.name}: {broken} line(s) of epochs.jsonl cannot be read and are left out"
        return cast(list[Object], lines), [Note(text, LeftOut.BROKEN_EPOCHS)] if broken else []


@dataclass(frozen=True)
class Records:
    """The result of a search.

    folders:   those of attempts, in the order of their real paths
    published: the files of published measurements
    notes:     one for each folder or link that cannot be followed
    """

    folders: list[Path]
    published: list[Path]
    notes: list[Note]

    def named(self, names: Collection[str]) -> dict[str, Attempt]:
        """The attempts of some rows of runs.csv, by their column `path`."""
        return {name: read(folder) for folder in self.folders if (name := printable(str(folder))) in names}


def read_all(folders: Sequence[Path]) -> Records:
    """All attempts below the folders, not yet read. UserError where there is none."""
    for folder in folders:
        with reporting(f"{folder} cannot be read", "ask the owner for access"):
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder: give the results_dir of your runs")
            os.scandir(folder).close()
    records = search(folders)
    if not records.folders and not records.published:
        names = ", ".join(str(folder) for folder in folders)
        but = f" ({'; '.join(note.text for note in records.notes[:3])})" if records.notes else ""
        raise UserError(
            f"no run in {names}{but}: start one with "
            f"python -m ddlbench +framework=ddp +model=resnet50 results_dir={folders[0]}, then report again"
        )
    return records


def search(folders: Sequence[Path]) -> Records:
    """Every folder named attempt-* at or below the folders. Symbolic links are followed, too, after the real folders;
    each folder is there once, also if links form circles. What cannot be followed inside an attempt is reported with
    the attempt."""
    attempts, published, closed, seen = dict[str, Path](), list[Path](), dict[Path, OSError](), set[str]()
    real, linked = deque((folder, WITHOUT_END) for folder in folders), deque[tuple[Path, int]]()
    while real or linked:
        (folder, levels), waiting = (real.popleft(), real) if real else (linked.popleft(), linked)
        place = os.path.realpath(folder)
        if place in seen:
            continue
        seen.add(place)
        if folder.name.startswith("attempt-") or Path(place).name.startswith("attempt-"):
            attempts[place] = folder
        try:
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name) if levels else ():
                path = folder / entry.name
                try:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((path, levels - 1))
                    elif entry.is_symlink() and stat.S_ISDIR(path.stat().st_mode):
                        linked.append((path, min(levels - 1, BELOW_LINKS)))
                    elif re.fullmatch("attempt-[0-9]+", entry.name):
                        raise OSError(ENOTDIR, "it is not a folder")
                    elif entry.name == PUBLISHED_FILE:
                        published.append(path)
                except OSError as error:
                    closed[path] = error
        except OSError as error:
            closed[folder] = error
    notes = list[Note]()
    for path, error in closed.items():
        if not {path, path.parent} & set(attempts.values()):
            kind = LeftOut.CIRCLE if error.errno == ELOOP else LeftOut.NOT_FOLLOWED
            notes.append(Note(f"{printable(str(path))} cannot be read ({error.strerror or error})", kind))
    return Records([attempts[place] for place in sorted(attempts)], published, notes)


def read(path: Path) -> Attempt:
    """The attempt in a folder. One whose record says `running` counts as killed if no process of it is left."""
    try:
        record = parse(read_bytes(path / "run.json"))
    except Exception as error:  # whatever one record holds, the others are reported
        circle = isinstance(error, OSError) and error.errno == ELOOP
        kind = LeftOut.CIRCLE if circle else _KINDS.get(type(error), LeftOut.UNREADABLE)
        return unreadable(path, f"run.json cannot be read ({reason_of(error)})", kind=kind)
    if refused := other_version(path, record):
        return refused
    if not isinstance(record.get("status"), str):
        return unreadable(path, "run.json has no status", record["schema_version"], LeftOut.NO_RUN)
    if record["status"] != "running":
        return Attempt(path, record)
    if (killed := find_killed(path)) is None:
        unknown = "no end was recorded: it is still running, or was killed before it could write one"
        return Attempt(path, record | {"reason": record.get("reason") or unknown}, has_end=False)
    with suppress(Exception):
        if parse(read_bytes(path / "run.json")).get("status") != "running":
            return read(path)  # the end was written meanwhile
    return Attempt(path, record | {"status": "killed", "reason": killed[0]}, has_end=False)


def read_published(path: Path) -> list[Attempt]:
    """The records of a published.jsonl. A line or a file that cannot be used becomes an unreadable attempt."""
    try:
        lines = read_bytes(path).split(b"\n")
    except (OSError, ValueError) as error:
        return [unreadable(path, f"it cannot be read ({reason_of(error)})")]
    return [_attempt(path.with_name(f"{path.name}:{n}"), line) for n, line in enumerate(lines, 1) if line.strip()]


def _attempt(path: Path, line: bytes) -> Attempt:
    try:
        record = parse(line)
    except ValueError as error:
        return unreadable(path, f"the line cannot be read ({reason_of(error)})")
    if refused := other_version(path, record):
        return refused
    if record.get("status") != "ok":
        return unreadable(path, "a published measurement has the status ok", record["schema_version"])
    return Attempt(path, record | {"origin": PUBLISHED})


def other_version(path: Path, record: Object) -> Attempt | None:
    """An unreadable attempt if the version of the record is not supported; the reason says what to do about it."""
    version = record.get("schema_version")
    number = version if type(version) is int else None  # True equals 1
    if number in READ_VERSIONS:
        return None
    kind, remedy = LeftOut.NO_RUN, "run again, or report with the version of ddlbench that wrote it"
    if number is not None and number > SCHEMA_VERSION:
        kind, remedy = LeftOut.NEWER, "it is newer: update ddlbench to report it"
    elif number is not None:
        kind, remedy = LeftOut.OLDER, f"it is older: {remedy}"
    refused = f"schema_version {shortened(str(version), 40)} is refused, this ddlbench reads {READS}"
    return unreadable(path, f"{refused}: {remedy}", number, kind)


def unreadable(path: Path, reason: str, version: Any = None, kind: str = LeftOut.UNREADABLE) -> Attempt:
    """An attempt whose record cannot be used. kind: of LeftOut"""
    number = re.fullmatch(r"attempt-([0-9]{1,9})", path.name)
    record = {
        "schema_version": version,
        "run_id": printable(path.parent.name),
        "attempt": int(number[1]) if number else None,
        "status": "unreadable",
        "reason": shortened(printable(reason), REASON),
    }
    return Attempt(path, record, (Note(f"{printable(str(path))}: {record['reason']}", kind),))


def lines_of(content: bytes) -> tuple[list[Object], int]:
    """The JSON objects, and the number of lines that are none: a killed process may leave half a line."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    objects: list[Object] = []
    for line in lines:
        with suppress(ValueError):
            objects.append(parse(line))
    return objects, len(lines) - len(objects)


def reason_of(error: Exception) -> str:
    """An error in a few words."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
