"""published.jsonl grows by what is new: an import that is repeated adds nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddlbench.errors import UserError, reporting
from ddlbench.files import replacing
from ddlbench.foreign import Object
from ddlbench.record.files import plain
from ddlbench.results.reading.attempt_folders import PUBLISHED_FILE
from ddlbench.results.reading.published import PublishedAttempt, read_published
from ddlbench.results.rows import section
from ddlbench.texts import digest

COMPACT = (",", ":")


@dataclass
class Added:
    """What an import did.

    new, present: the number of measurements that were added, and of those that were stored already
    left_out: a line for each measurement that contradicts a stored one
    """

    new: int = 0
    present: int = 0
    left_out: list[str] = field(default_factory=list[str])


def add(records: Sequence[Object], results: Path) -> Added:
    """Add records to the published measurements of a results folder. UserError where its file cannot be read
    completely, or written."""
    path = results / PUBLISHED_FILE
    stored = _stored(path)
    names = {str(record.get("run_id")) for record in stored}
    by_configuration = {_configuration(record): record for record in stored}
    added, new = Added(), dict[str, Object]()
    for record in map(plain, records):
        name, configuration = record["run_id"], _configuration(record)
        if name in names:
            added.present += 1
        elif reason := _conflict(record, by_configuration.get(configuration), [*stored, *new.values()]):
            added.left_out.append(f"{name} ({_url(record)}): {reason}")
        else:
            new[name] = by_configuration[configuration] = record
    added.new = len(new)
    if new:
        with reporting(f"{path} cannot be written", "choose another --into"):
            results.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                for record in (*stored, *new.values()):
                    file.write(f"{json.dumps(record, separators=COMPACT)}\n".encode())
    return added


def _conflict(record: Object, same: Object | None, others: Sequence[Object]) -> str | None:
    """Why a record contradicts others; None if it does not. same: a stored record of its configuration and repeat"""
    if same is not None:
        if same.get("run_id") == record["run_id"]:
            return "it is given twice"
        return f"{same.get('run_id')} is another value of its configuration and repeat"
    # A table may have been made from logs. Logs are a folder, and only their records have a time to train.
    for other in others:
        one, two = (source if source.endswith("/") else f"{source}/" for source in map(_url, (record, other)))
        logs = ["time_to_train_s" in section(source, "published") for source in (record, other)]
        if logs[0] != logs[1] and (one.startswith(two) or two.startswith(one)):
            return f"its source is imported already as {_url(other)}"
    return None


def _stored(path: Path) -> list[Object]:
    attempts = read_published(path) if path.exists() else []
    for attempt in attempts:
        if not isinstance(attempt, PublishedAttempt):
            raise UserError(f"{attempt.name}: {attempt.record['reason']}: repair or remove it, then import again")
    return [attempt.record for attempt in attempts]


def _configuration(record: Object) -> str:
    return digest([section(record, "config"), section(record, "launch"), section(record, "environment")], 32)


def _url(record: Object) -> str:
    return str(section(record, "published").get("url"))
