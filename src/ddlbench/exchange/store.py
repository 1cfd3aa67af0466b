"""published.jsonl grows by what is new: an import that is repeated adds nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ddlbench.errors import UserError, reporting
from ddlbench.files import replacing
from ddlbench.foreign import Object
from ddlbench.record.files import plain
from ddlbench.results.reading.attempt_folders import PUBLISHED_FILE
from ddlbench.results.reading.published import PublishedAttempt, read_published
from ddlbench.results.rows import section
from ddlbench.texts import digest


def add(records: Sequence[Object], results: Path) -> tuple[int, int, list[str]]:
    """Add records to the published measurements of a results folder. UserError where its file cannot be read
    completely, or written.

    Returns the number of those that were added, the number of those that were stored already, and a line for each
    that contradicts another.
    """
    path, stored = results / PUBLISHED_FILE, list[Object]()
    for attempt in read_published(path) if path.exists() else []:
        if not isinstance(attempt, PublishedAttempt):
            raise UserError(f"{attempt.name}: {attempt.record['reason']}: repair or remove it, then import again")
        stored.append(attempt.record)
    names = {str(record.get("run_id")) for record in stored}
    by_configuration = {_configuration(record): record for record in stored}
    present, left_out, new = 0, list[str](), dict[str, Object]()
    for record in map(plain, records):
        name, configuration = record["run_id"], _configuration(record)
        if name in names:
            present += 1
        elif reason := _conflict(record, by_configuration.get(configuration), [*stored, *new.values()]):
            left_out.append(f"{name} ({_url(record)}): {reason}")
        else:
            new[name] = by_configuration[configuration] = record
    if new:
        with reporting(f"{path} cannot be written", "choose another --into"):
            results.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                for record in (*stored, *new.values()):
                    file.write(f"{json.dumps(record, separators=(',', ':'))}\n".encode())
    return len(new), present, left_out


def _conflict(record: Object, same: Object | None, others: Sequence[Object]) -> str | None:
    """Why a record contradicts others; None if it does not. same: a stored record of its configuration and repeat"""
    if same is not None:
        if same.get("run_id") == record["run_id"]:
            return "it is given twice"
        return f"{same.get('run_id')} is another value of its configuration and repeat"
    # A table may have been made from logs. Logs are a folder, and only their records have a time to train.
    for other in others:
        urls = [f"{_url(source).removesuffix('/')}/" for source in (record, other)]
        logs = ["time_to_train_s" in section(source, "published") for source in (record, other)]
        if logs[0] != logs[1] and (urls[0].startswith(urls[1]) or urls[1].startswith(urls[0])):
            return f"its source is imported already as {_url(other)}"
    return None


def _configuration(record: Object) -> str:
    return digest([section(record, "config"), section(record, "launch"), section(record, "environment")], 32)


def _url(record: Object) -> str:
    return str(section(record, "published").get("url"))
