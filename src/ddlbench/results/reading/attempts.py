"""Attempts are read from folders of results. A record that cannot be read becomes an attempt with a reason."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ddlbench.errors import UserError
from ddlbench.foreign import Object, TooLargeError, parse, read_bytes
from ddlbench.record.schema import READ_VERSIONS, SCHEMA_VERSION
from ddlbench.results.reading.attempt_folders import search
from ddlbench.results.reading.epoch_lines import lines_of
from ddlbench.results.reading.gone import find_gone
from ddlbench.results.reading.left_out import of_error, of_reason, of_version
from ddlbench.texts import printable, shortened

READS = " and ".join(map(str, READ_VERSIONS))
MOST_LINES = 200_000  # of epochs.jsonl: each becomes a row, however short it is
REASON = 300  # letters of a reason: an error may quote what it cannot read


@dataclass(frozen=True)
class Attempt:
    """One attempt's files. If run.json is unreadable, only the folder's name is available. The epochs are read when
    they are asked for, because those of many attempts would fill the memory.

    record:   run.json
    warnings: why it could not be used
    left_out: why an unreadable attempt is left out, as a kind of left_out.py
    has_end:  whether the record itself says how the run ended
    """

    path: Path
    record: Object
    warnings: tuple[str, ...] = ()
    left_out: str | None = None
    has_end: bool = True

    @property
    def name(self) -> str:
        """The folder, as it can be printed."""
        return printable(str(self.path))

    @property
    def epochs(self) -> list[Object]:
        """Lines of epochs.jsonl."""
        return lines_of(self.read_epochs()[0])[0]

    def read_epochs(self) -> tuple[bytes, str | None]:
        """epochs.jsonl, and a warning if it cannot be read. Both are empty beside an unreadable run.json."""
        file = self.path / "epochs.jsonl"
        if self.record["status"] == "unreadable" or not os.path.lexists(file):
            return b"", None
        try:
            content = read_bytes(file)
            if (lines := content.count(b"\n")) > MOST_LINES:
                raise TooLargeError(f"it has {lines:,} lines, more than the {MOST_LINES:,} that are read")
        except (OSError, ValueError) as error:
            return b"", f"{self.name}: epochs.jsonl cannot be read ({why(error)}) and is left out"
        return content, None


@dataclass(frozen=True)
class Records:
    """The folders of all attempts; a warning and the kind of its reason for each folder that could not be read."""

    folders: list[Path]
    warnings: list[str]
    left_out: tuple[str, ...] = ()

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts in memory."""
        return list(map(read, self.folders))


def read_all(folders: Sequence[Path]) -> Records:
    """Every attempt below the folders; none is read yet. UserError where there is none."""
    for folder in folders:
        _listable(folder)
    result = search(folders)
    attempts = set(result.attempts.values())  # a folder of an attempt is reported with the attempt
    reasons = {path: why for path, why in result.unreadable.items() if attempts.isdisjoint((path, path.parent))}
    closed = [f"{printable(str(path))} cannot be read ({reason})" for path, reason in reasons.items()]
    if not result.attempts:
        names = ", ".join(str(folder) for folder in folders)
        but = f" ({'; '.join(closed[:3])})" if closed else ""
        raise UserError(
            f"no run in {names}{but}: start one with "
            f"python -m ddlbench +framework=ddp +model=resnet50 results_dir={folders[0]}, then report again"
        )
    ordered = [result.attempts[place] for place in sorted(result.attempts)]
    return Records(ordered, closed, tuple(map(of_reason, reasons.values())))


def _listable(folder: Path) -> None:
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is not a folder: give the results_dir of your runs") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): ask the owner for access") from error


def read(path: Path) -> Attempt:
    """The attempt in a folder."""
    try:
        record = parse(read_bytes(path / "run.json"))
    except Exception as error:  # whatever one record holds, the others are reported
        return unreadable(path, f"run.json cannot be read ({why(error)})", kind=of_error(error))
    version = record.get("schema_version")
    if type(version) is not int or version not in READ_VERSIONS:  # True equals 1
        number = version if type(version) is int else None
        return unreadable(path, _refusal(version), number, of_version(version))
    if not isinstance(record.get("status"), str):
        return unreadable(path, "run.json has no status", version, "not JSON of a run")
    return Attempt(path, record) if record["status"] != "running" else _without_end(path, record)


def _refusal(version: Any) -> str:
    """Why a record of another version is not read, and what to do about it."""
    remedy = "run again, or report with the version of ddlbench that wrote it"
    if type(version) is int:
        newer = version > SCHEMA_VERSION
        remedy = "it is newer: update ddlbench to report it" if newer else f"it is older: {remedy}"
    return f"schema_version {shortened(str(version), 40)} is refused, this ddlbench reads {READS}: {remedy}"


def unreadable(path: Path, reason: str, version: Any = None, kind: str = "unreadable") -> Attempt:
    """An attempt whose record cannot be used. kind: of left_out.py"""
    number = re.fullmatch(r"attempt-([0-9]{1,9})", path.name)
    record = {
        "schema_version": version,
        "run_id": printable(path.parent.name),
        "attempt": int(number[1]) if number else None,
        "status": "unreadable",
        "reason": shortened(printable(reason), REASON),
    }
    return Attempt(path, record, (f"{printable(str(path))}: {record['reason']}",), kind)


def _without_end(path: Path, record: Object) -> Attempt:
    """An attempt whose record says `running`. It counts as killed if no process of it is left."""
    gone = find_gone(path, time.time())
    if gone is None:
        unknown = "no end was recorded: it is still running, or was killed before it could write one"
        return Attempt(path, record | {"reason": record.get("reason") or unknown}, has_end=False)
    try:
        again = parse(read_bytes(path / "run.json"))  # the end may have been written between the two looks
    except Exception:
        again = record
    if again.get("status") != "running":
        return read(path)
    return Attempt(path, record | {"status": "killed", "reason": gone.reason}, has_end=False)


def why(error: Exception) -> str:
    """An error in a few words."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
