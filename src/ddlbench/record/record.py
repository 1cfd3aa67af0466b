"""One attempt's files: run.json, epochs.jsonl, steps.parquet, ranks.parquet. Only rank 0 writes.

run.json exists from the start with status `running` and is replaced as a whole, never edited: a reader gets the old
version or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa

from ddlbench.errors import RunError, UserError, reporting, why
from ddlbench.heartbeat import Heartbeat, Process
from ddlbench.measure.rows import EpochRow
from ddlbench.progress import tell
from ddlbench.record.epoch_files import RANK_SCHEMA, STEP_SCHEMA, EpochFiles, rank_row, step_table
from ddlbench.record.files import CLAIM, HEARTBEAT, RESERVE, now, plain, write_json
from ddlbench.record.schema import SCHEMA_VERSION
from ddlbench.texts import digest

RESERVE_BYTES = 2**18  # some times the size of a run.json: freed for the last one where the disk is full
EPOCHS = "epochs.jsonl"


def run_id(config: Mapping[str, Any], world_size: int, nodes: int, dataset_hash: str) -> str:
    """A pure function of what was to be measured: readable prefix and short hash."""
    identity = {"config": config, "world_size": world_size, "nodes": nodes, "dataset": dataset_hash}
    names = "-".join(str(config[group]["name"]) for group in ("framework", "model", "loader"))
    mode = "loader-" if config.get("mode") == "loader" else ""
    return f"{mode}{names}-{world_size}x-{digest(identity)}"


def writable(results_dir: str, key: str = "results_dir") -> None:
    """Raise UserError unless a run's folder can be made there; every rank can ask before anything starts. It makes no
    folder: what is tried is the nearest one that exists."""
    folder = Path(results_dir)
    with reporting(f"{key}={results_dir} cannot be written", f"choose another {key}="):
        while not os.path.lexists(folder):
            folder = folder.parent
        probe = folder / f".writable-{os.getpid()}-{os.uname().nodename}"
        probe.touch()
        probe.unlink()
        (Path(results_dir) / "attempt-1").exists()  # raises for a name that is too long


class Record:
    """The open files of one attempt. `finish` may come from any thread; the first one counts."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.folder = folder
        self.content = content
        self.lock = threading.RLock()
        self.finished = self.saved = False
        self.rows: list[EpochRow] = []
        self.steps = EpochFiles(folder / "steps.parquet", STEP_SCHEMA)
        self.ranks = EpochFiles(folder / "ranks.parquet", RANK_SCHEMA)
        self.reserve = folder / RESERVE
        self.heartbeat: Heartbeat | None = None
        self.interrupted: Callable[[], tuple[int, Any] | None] = lambda: None  # an epoch that is on, and its steps

    @classmethod
    def open(cls, results_dir: str, run: str, content: Mapping[str, Any]) -> Record:
        """The next free attempt of a run, its run.json written with status `running`."""
        attempt = 1
        while True:
            folder = Path(results_dir) / run / f"attempt-{attempt}"
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                attempt += 1
        head = {
            "schema_version": SCHEMA_VERSION,
            "run_id": run,
            "attempt": attempt,
            "status": "running",
            "reason": None,
            "ended_by": None,
            "times": {"start": now(), "end": None},
        }
        record = cls(folder, {**head, **content})
        try:
            with reporting(f"{folder} cannot be written", "choose another results_dir="):
                record.reserve.write_bytes(os.urandom(RESERVE_BYTES))  # zeros take no place on a disk that compresses
                (folder / HEARTBEAT).write_text(json.dumps(vars(Process.this())))  # before run.json says `running`
                record.write()
        except UserError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        record.heartbeat = Heartbeat(folder / HEARTBEAT)
        return record

    def add(self, **sections: Any) -> None:
        """Put sections into run.json as they become known."""
        with self.lock:
            self.content.update(sections)

    def epoch(self, row: EpochRow) -> None:
        """A line of epochs.jsonl, on disk before the next epoch begins; the steps of every rank with it. Of the row's
        steps the slowest rank's seconds stay in memory. RunError where it cannot be written."""
        with self.lock, self.saving():
            if self.finished:
                return
            self.steps.append(row.epoch, (step_table(row.epoch, rank, row.warmup) for rank in row.ranks))
            ranks = [rank_row(row, rank) for rank in row.ranks]
            self.ranks.append(row.epoch, [pa.Table.from_pylist(ranks, schema=RANK_SCHEMA)])
            row.ranks = []  # those of a thousand ranks and epochs would not fit into memory
            self.rows.append(row)
            with (self.folder / EPOCHS).open("a") as lines:
                lines.write(json.dumps(plain(row.line())) + "\n")
                lines.flush()
                os.fsync(lines.fileno())

    def resume(self, resumed: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> None:
        """This attempt continues an earlier one. resumed: the section `resume`; epochs: the lines of epochs.jsonl that
        earlier attempts measured, which say so."""
        with self.lock, self.saving():
            self.content["resume"] = dict(resumed)
            with (self.folder / EPOCHS).open("a") as lines:
                for line in epochs:
                    lines.write(json.dumps({"measured_in_attempt": resumed["attempt"], **line}) + "\n")
            self.write()

    def lines(self) -> list[dict[str, Any]]:
        """The lines of epochs.jsonl so far."""
        return [json.loads(line) for line in (self.folder / EPOCHS).read_text().splitlines()]

    def save(self) -> None:
        """Put what is known so far on disk. RunError where it cannot be written."""
        with self.lock, self.saving():
            self.write()

    def finish(self, status: str, reason: str | None = None, final: bool = True, ended_by: str | None = None) -> bool:
        """Close the attempt with its status; whether that is on disk. Never raises: where the disk is full or the
        folder gone, stderr says so. The first final call counts; one before it that is not final may only be followed
        by another failure. ended_by: of errors.py"""
        with self.lock:
            ended = self.content["status"] != "running"
            if self.finished or (ended and status == "ok"):
                return self.saved and status == self.content["status"]
            self.finished = final
            self.content.update(status=status, reason=reason, ended_by=ended_by)
            self.content["times"]["end"] = now()
            self.saved = self._save_at_last()
            if final:
                if self.heartbeat is not None:
                    self.heartbeat.stop()
                # After the end is on disk: whatever happens here cannot change it. An end that could not be written
                # leaves the heartbeat's file, from which a later reader sees that the run has ended.
                with contextlib.suppress(Exception):
                    if self.saved:
                        (self.folder / HEARTBEAT).unlink(missing_ok=True)
                        if interrupted := self.interrupted():
                            epoch, table = interrupted
                            self.steps.append(epoch, [table])
                for files in (self.steps, self.ranks):
                    with contextlib.suppress(OSError):  # its folder serves as well
                        files.close()
            return self.saved

    def _save_at_last(self) -> bool:
        try:
            self.reserve.unlink(missing_ok=True)
            return self.write()
        except Exception as error:
            reason = why(error) if isinstance(error, OSError) else repr(error)
            end = ": ".join(str(self.content[key]) for key in ("status", "reason") if self.content[key])
            tell(f"the end cannot be recorded in {self.folder} ({reason}): {end}")
            return False

    def write(self) -> bool:
        """Replace run.json, unless another process has written the end meanwhile, because this one was stopped;
        whether it did."""
        with self.lock:
            if (self.folder / CLAIM).exists():
                return False
            write_json(self.folder / "run.json", self.content)
            return True

    def saving(self) -> AbstractContextManager[None]:
        """RunError where a file of the record cannot be written."""
        what, remedy = f"the record in {self.folder} cannot be written", "free space or choose another results_dir="
        return reporting(what, remedy, RunError)
