"""One attempt's files: run.json, epochs.jsonl, steps.parquet. Only the first rank writes.

run.json is there from the start with status `running` and is replaced whole, never edited: a reader finds the old
version or the new one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddlbench.errors import UserError
from ddlbench.measure.rows import EpochRow
from ddlbench.results.steps import StepTable

SCHEMA_VERSION = 1


def run_id(config: Mapping[str, Any], world_size: int, nodes: int, dataset_hash: str) -> str:
    """A pure function of what was to be measured: readable prefix and short hash."""
    identity = {"config": config, "world_size": world_size, "nodes": nodes, "dataset": dataset_hash}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    names = "-".join(str(config[group]["name"]) for group in ("framework", "model", "loader"))
    alone = "loader-" if config.get("mode") == "loader" else ""
    return f"{alone}{names}-{world_size}x-{digest}"


def writable(results_dir: str) -> None:
    """Raise UserError unless a run's folder can be made there; every rank can ask before anything starts. It makes no
    folder: what is tried is the nearest one that exists."""
    folder = Path(results_dir)
    try:
        while not os.path.lexists(folder):
            folder = folder.parent
        probe = folder / f".writable-{os.getpid()}-{os.uname().nodename}"
        probe.touch()
        probe.unlink()
        (Path(results_dir) / "attempt-1").exists()  # raises for a name that is too long
    except OSError as error:
        message = f"results_dir={results_dir} cannot be written ({error.strerror}): choose another results_dir="
        raise UserError(message) from error


class Record:
    """The open files of one attempt. `finish` may come from any thread; the first one counts."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.folder = folder
        self.content = content
        self.lock = threading.RLock()
        self.finished = False
        self.rows: list[EpochRow] = []
        self.steps = StepTable(folder / "steps.parquet")

    @classmethod
    def open(cls, results_dir: str, run: str, content: Mapping[str, Any]) -> Record:
        """The next free attempt of a run, its run.json written with status `running`."""
        attempt, folder = _next_attempt(Path(results_dir) / run)
        head = {
            "schema_version": SCHEMA_VERSION,
            "run_id": run,
            "attempt": attempt,
            "status": "running",
            "reason": None,
        }
        record = cls(folder, {**head, "times": {"start": _now(), "end": None}, **content})
        record.write()
        return record

    def add(self, **sections: Any) -> None:
        """Put sections into run.json as they become known."""
        with self.lock:
            self.content.update(sections)

    def epoch(self, row: EpochRow) -> None:
        """A line of epochs.jsonl, on disk before the next epoch begins; the steps of every rank with it."""
        with self.lock:
            if self.finished:
                return
            self.rows.append(row)
            self.steps.append(row)
            with (self.folder / "epochs.jsonl").open("a") as lines:
                lines.write(json.dumps(_plain(row.line())) + "\n")
                lines.flush()
                os.fsync(lines.fileno())

    def finish(self, status: str, reason: str | None = None) -> None:
        """Close the attempt with its status. Later calls change nothing."""
        with self.lock:
            if self.finished:
                return
            self.finished = True
            self.content.update(status=status, reason=reason)
            self.content["times"]["end"] = _now()
            self.steps.close()
            self.write()

    def write(self) -> None:
        with self.lock:
            write_json(self.folder / "run.json", self.content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file whole: temporary file in the same folder, flush, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(_plain(content), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _next_attempt(run: Path) -> tuple[int, Path]:
    number = 1
    while True:
        folder = run / f"attempt-{number}"
        try:
            folder.mkdir(parents=True)
            return number, folder
        except FileExistsError:
            number += 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _plain(value: Any) -> Any:
    """What JSON can hold: a number that is not finite is unknown, null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
