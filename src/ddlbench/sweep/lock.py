"""Claims: two sweeps at once never run a cell twice, on one machine or on several that share a file system.

A claim is the file .sweep/<cell>.<n> in the results folder. It is created with O_EXCL, which is atomic on NFS (version
3 and later) and Lustre, and once written it is never removed: the claim after one that was released, or whose owner has
ended, has the number n + 1. So only one of two processes that find the same dead owner takes its place, and no process
needs the listing of a folder, which NFS may give from a cache.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ddlbench.errors import UserError, why
from ddlbench.files import replacing
from ddlbench.foreign import parse, read_bytes
from ddlbench.heartbeat import SILENT_S, Heartbeat, Process, age, lives, server_time

FOLDER = ".sweep"
JOB = re.compile(r"ddlbench-[\w. -]+")  # names of Slurm jobs


@dataclass(frozen=True)
class Owner(Process):
    """The holder of a claim: a process, or the Slurm job of a name."""

    job: str | None = None

    @classmethod
    def this(cls, job: str | None = None) -> Owner:
        return cls(**vars(Process.this()), job=job)


Start = tuple[str, str]  # of a job: its number, and how often Slurm had put it back into the queue


@dataclass(frozen=True)
class Queue:
    """The jobs that wait or run, by name. None if Slurm does not answer: then any job may wait or run. A waiting job
    has the number of its next start."""

    starts: Mapping[str, Start] | None

    def __call__(self, name: str) -> bool:
        """Whether the job of this name waits or runs."""
        return self.starts is None or name in self.starts


def queue() -> Queue:
    try:
        command = ["squeue", "--noheader", "--Format=Name:200,JobID:20,RestartCnt:20"]
        # Without the user's filters, which hide jobs.
        env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=60, check=True, env=env)
    except (OSError, subprocess.SubprocessError):
        return Queue(None)
    jobs = (line.rsplit(maxsplit=2) for line in done.stdout.splitlines())
    return Queue({job[0].strip(): (job[1], job[2]) for job in jobs if len(job) == 3 and job[2].isdigit()})


class Claim:
    """One cell's claim while it is held; a heartbeat shows other hosts that its owner is running."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path = path
        self._heartbeat = Heartbeat(path) if owner.job is None else None

    def lost(self) -> bool:
        """Whether another process has taken over because it saw no heartbeat: this process was stopped for long."""
        return _next(self.path).exists()

    def release(self) -> None:
        """Let the next claim follow. Never raises: without a release it follows after the end of this process."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        with contextlib.suppress(OSError), replacing(self.path, through=self.path.parent) as file:
            file.write(b'{"released": true}')


def claim(
    results: Path,
    cell: str,
    job: str | None = None,
    queued: Callable[[str], bool] = lambda _: True,
    read_at: float = math.inf,
) -> Claim | None:
    """This process's claim of a cell (or that of a Slurm job that it is about to submit); None if another holds it.

    queued: whether the Slurm job of a name is still waiting or running
    read_at: when the caller asked for the jobs and read the records, by the file server's clock. A claim that changed
    later holds even if its owner has ended, because its actions since then are not known
    """
    folder = results / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    owner, path = Owner.this(job), folder / f"{cell}.1"
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            # A claim that changed in the future comes from a clock that was set back.
            changed = path.stat().st_mtime
            if _held(path, queued) or read_at < changed <= server_time(folder):
                return None
            path = _next(path)
            continue
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(owner), file)
        except OSError as error:
            path.unlink()  # it would hold the cell
            raise UserError(f"{path} cannot be written ({why(error)}): free space or choose results_dir=") from error
        return Claim(path, owner)


def holder(results: Path, cell: str, queued: Callable[[str], bool] = lambda _: True) -> Owner | None:
    """The owner of a cell's last claim while it holds the cell."""
    path, owner = last_claim(results, cell)
    return owner if path and _held(path, queued) else None


def last_claim(results: Path, cell: str) -> tuple[Path | None, Owner | None]:
    """The file of a cell's last claim and the owner that it names. No file if that claim was released. No owner if no
    sweep has written the file, or if one is writing it now."""
    path, last = results / FOLDER / f"{cell}.1", None
    while path.exists():
        path, last = _next(path), path
    owner, released = _read(last) if last else (None, True)
    return None if released else last, owner


def _held(path: Path, queued: Callable[[str], bool]) -> bool:
    owner, released = _read(path)
    if owner is None:  # where it is not released, its owner may be writing it now
        return not released and age(path) < SILENT_S
    if owner.job is not None:
        # Until `sbatch` has ended no job of the name is known: a live process may still submit it.
        return queued(owner.job) or (lives(owner, path) and age(path) < SILENT_S)
    return lives(owner, path)


def _read(path: Path) -> tuple[Owner | None, bool]:
    """The owner that a claim names, and whether it was released. No owner for a released claim, and for content that
    no sweep has written: then no process gets a signal, and no job is cancelled."""
    try:
        content = parse(read_bytes(path))
        if content.get("released"):
            return None, True
        owner = Owner(**content)
    except (OSError, TypeError, ValueError):
        return None, False
    named = owner.job is None or (type(owner.job) is str and JOB.fullmatch(owner.job) is not None)
    return owner if named else None, False


def _next(path: Path) -> Path:
    cell, _, number = path.name.rpartition(".")
    return path.with_name(f"{cell}.{int(number) + 1}")
