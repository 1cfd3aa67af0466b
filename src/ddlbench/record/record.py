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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ddlbench.errors import RunError, UserError, reporting, why
from ddlbench.files import replacing
from ddlbench.foreign import parse, read_bytes, section
from ddlbench.heartbeat import Heartbeat, Process
from ddlbench.measure.devices.meter import Use
from ddlbench.measure.rows import EpochRow, RankEpoch
from ddlbench.progress import tell
from ddlbench.record.files import CLAIM, HEARTBEAT, RESERVE, now, plain, write_json
from ddlbench.record.schema import RANK_EPOCHS, SCHEMA_VERSION, STEPS, schema_of
from ddlbench.texts import digest

RESERVE_BYTES = 2**20  # twice a run.json with the window of 1,024 ranks: removed on a full disk, so that the last fits
EPOCHS = "epochs.jsonl"
TABLES_IN_A_GROUP = 64  # ranks in a row group: with a group for each rank the index would be larger than the rows
STEP_SCHEMA, RANK_SCHEMA = schema_of(STEPS), schema_of(RANK_EPOCHS)


def run_id(config: Mapping[str, Any], world_size: int, nodes: int, dataset_hash: str) -> str:
    """A readable prefix and a short hash of what the run measures; equal runs have equal ids."""
    identity = {"config": config, "world_size": world_size, "nodes": nodes, "dataset": dataset_hash}
    names = "-".join(str(config[group]["name"]) for group in ("framework", "model", "loader"))
    mode = "loader-" if config.get("mode") == "loader" else ""
    return f"{mode}{names}-{world_size}x-{digest(identity)}"


def writable(results_dir: str, key: str = "results_dir") -> None:
    """Raise UserError unless the folder of a run can be made there. It makes no folder, but tries to write into the
    nearest one that exists, so that every rank can ask before anything starts."""
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
        """The next free attempt of a run. Its run.json is written with status `running`."""
        attempts, attempt = Path(results_dir) / run, 1
        with reporting(f"{attempts} cannot be written", "choose another results_dir="):
            attempts.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    (folder := attempts / f"attempt-{attempt}").mkdir()
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
        """Write a line of epochs.jsonl and the steps of every rank, before the next epoch begins. Only the seconds of
        the slowest rank's steps stay in memory. RunError where it cannot be written."""
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
        """Note that this attempt continues an earlier one, whose bad samples count. resumed: the section `resume`;
        epochs: the lines of epochs.jsonl that earlier attempts measured; each line says which attempt did"""
        with contextlib.suppress(
            OSError, ValueError
        ):  # the attempt's record is gone, and its bad samples are not known
            earlier = parse(read_bytes(self.folder.with_name(f"attempt-{resumed['attempt']}") / "run.json"))
            bad = section(earlier, "loader").get("bad_samples")
            self.content["loader"] = {**section(self.content, "loader"), "bad_samples": bad or []}
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
        """Close the attempt with its status; returns whether that is on disk. It raises no error: if the disk is full
        or the folder is gone, stderr says so. The first final call counts. After a failure that is not final, only
        another failure may follow; after a request to stop, which may come too late, also `ok`. ended_by: of errors.py
        """
        with self.lock:
            failed = self.content["status"] != "running" and self.content["ended_by"] is None
            if self.finished or (failed and status == "ok"):
                return self.saved and status == self.content["status"]
            self.finished = final
            self.content.update(status=status, reason=reason, ended_by=ended_by)
            self.content["times"]["end"] = now()
            self.saved = self._save_at_last()
            if final:
                if self.heartbeat is not None:
                    self.heartbeat.stop()
                # The end is on disk, and no error here can change it. If it could not be written, the file of the
                # heartbeat stays, from which a later reader sees that the run has ended.
                with contextlib.suppress(Exception):
                    if self.saved:
                        (self.folder / HEARTBEAT).unlink(missing_ok=True)
                        if interrupted := self.interrupted():
                            epoch, table = interrupted
                            self.steps.append(epoch, [table])
                for files in (self.steps, self.ranks):
                    with contextlib.suppress(OSError):  # the folder can be read as well
                        files.close()
            return self.saved

    def _save_at_last(self) -> bool:
        try:
            self.reserve.unlink(missing_ok=True)
            if written := self.write():
                return written
            tell(f"another process has recorded the end in {self.folder}, because this one was stopped for long")
            return False
        except Exception as error:
            reason = why(error) if isinstance(error, OSError) else repr(error)
            end = ": ".join(str(self.content[key]) for key in ("status", "reason") if self.content[key])
            tell(f"the end cannot be recorded in {self.folder} ({reason}): {end}")
            return False

    def write(self) -> bool:
        """Replace run.json; returns whether it did. It does not if this process was stopped, so that another one wrote
        the end."""
        with self.lock:
            if (self.folder / CLAIM).exists():
                return False
            write_json(self.folder / "run.json", self.content)
            return True

    def saving(self) -> AbstractContextManager[None]:
        """RunError where a file of the record cannot be written."""
        what, remedy = f"the record in {self.folder} cannot be written", "free space or choose another results_dir="
        return reporting(what, remedy, RunError)


@dataclass
class EpochFiles:
    """A table that grows by one file an epoch: steps.parquet and ranks.parquet.

    During the run it is a folder with one file for each epoch, so that a run that is killed leaves its epochs;
    pandas.read_parquet reads the folder as one table. At the end of the run the files become one file. The memory for
    this does not grow with the number of ranks or epochs. A file has its name only when it is complete.
    """

    path: Path
    schema: Any

    def append(self, epoch: int, tables: Iterable[Any]) -> None:
        """Write tables with the schema, in their order. OSError where that fails: then nothing of the epoch is left."""
        self.path.mkdir(exist_ok=True)
        path, rest = self.path / f"epoch-{epoch:06}.parquet", iter(tables)
        # Readers pass over the temporary file, because it is hidden.
        with replacing(path, through=self.path) as file, pq.ParquetWriter(file, self.schema) as writer:
            while group := list(islice(rest, TABLES_IN_A_GROUP)):
                writer.write_table(pa.concat_tables(group))

    def close(self) -> None:
        """Put one file in the place of the folder. OSError where that fails, also for a damaged file of an epoch; then
        the epochs can be read as before."""
        if not self.path.is_dir():
            return
        complete, epochs = self.path.with_name(f".{self.path.name}"), self.path.with_name(f".{self.path.name}-epochs")
        with replacing(complete, through=complete.parent) as file, pq.ParquetWriter(file, self.schema) as writer:
            for epoch in sorted(self.path.glob("epoch-*.parquet")):
                try:
                    with pq.ParquetFile(epoch) as rows:
                        for group in range(rows.num_row_groups):
                            writer.write_table(rows.read_row_group(group))
                except (pa.ArrowException, ValueError) as error:
                    raise OSError(f"{epoch} is damaged: {error}") from error
        self.path.rename(epochs)
        complete.rename(self.path)
        shutil.rmtree(epochs, ignore_errors=True)


def step_table(epoch: int, rank: RankEpoch, warmup: bool, complete: bool = True) -> Any:
    """The steps of one rank. complete: whether the epoch ended"""
    steps, times = len(rank.times.step_s), rank.times
    number = np.arange(steps)
    losses = np.asarray(rank.losses)
    columns: dict[str, Any] = {
        "rank": np.full(steps, rank.rank),
        "data_rank": np.full(steps, rank.data_rank),
        "epoch": np.full(steps, epoch),
        "step": number,
        "step_time_s": np.asarray(times.step_s),
        "data_wait_s": np.asarray(times.wait_s),
        "host_wait_s": np.asarray(times.host_wait_s) if len(times.host_wait_s) else pa.nulls(steps),
        "lr": np.asarray(rank.rates) if len(rank.rates) else pa.nulls(steps),
        "loss": pa.array(losses, pa.float64(), mask=~np.isfinite(losses)) if len(losses) else pa.nulls(steps),
        "warmup": warmup | (number < times.warmup_steps),
        "complete": np.full(steps, complete),
    }
    return pa.table(columns, schema=STEP_SCHEMA)


def rank_row(row: EpochRow, rank: RankEpoch) -> dict[str, Any]:
    """A row of ranks.parquet: where a rank is and what it used."""
    times, place = rank.times, rank.coordinates
    use = times.use or Use(seconds=0.0, counts_energy=False)
    return {
        "rank": rank.rank,
        "host": rank.host,
        "dp": rank.data_rank,
        "tp": place.get("tp", place.get("sp", 0)),
        "pp": rank.stage,
        "epoch": row.epoch,
        "warmup": row.warmup,
        "samples": rank.samples,
        "epoch_time_s": times.epoch_s,
        "measured_time_s": times.measured_s,
        "straggler_wait_s": times.straggler_s,
        "data_wait_s": sum(times.wait_s),
        "host_wait_s": sum(times.host_wait_s),
        "thread_time_s": use.thread_s,
        "sent_bytes": use.sent_bytes,
        **rank.memory,
        "energy_j": use.energy_j,
        "device_clock_before_mhz": use.clock_before_mhz,
        "device_clock_after_mhz": use.clock_after_mhz,
        "throttle_reasons": ", ".join(use.throttled or ()) or None,
    }
