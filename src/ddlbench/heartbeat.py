"""A file that names a process and whose time that process renews: others tell from it whether the process has ended."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddlbench.foreign import parse, read_bytes

BEAT_S = 10.0  # between two heartbeats: parallel file systems must not be kept busy
SILENT_S = 120.0  # without a heartbeat for so long, a process on another host counts as ended


@dataclass(frozen=True)
class Process:
    """One process. TypeError for values that describe none, because they may come from a file that others wrote.

    place: host, its boot and its process namespace, which give a process number its meaning
    started: seconds from the boot to its start
    """

    place: str
    pid: int
    started: float

    def __post_init__(self) -> None:
        types = type(self.place) is str, type(self.pid) is int, type(self.started) in (int, float)  # True is no number
        if not all(types) or not 0 < self.pid < 2**31 or not self.started < 2**63:
            raise TypeError(f"{self.pid} of {self.place}, started at {self.started}, is no process")

    @classmethod
    def this(cls) -> Process:
        return cls(this_place(), os.getpid(), _started(os.getpid()))

    def alive(self) -> bool | None:
        """Whether it has not ended; None where only heartbeats are known: for a process of another host, and for one of
        another user that /proc does not show (hidepid, proc(5))."""
        if self.place != this_place():
            return None
        try:
            return abs(_started(self.pid) - self.started) < 1
        except (psutil.Error, ProcessLookupError):
            try:
                os.kill(self.pid, 0)
            except OSError as error:
                return None if isinstance(error, PermissionError) else False  # None: of another user
            return False


class Heartbeat:
    """Renews the time of a file, and not its content, until it is stopped or the file is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                os.utime(self.path)  # the file server's clock
            except FileNotFoundError:
                return
            except OSError:
                continue


def age(path: Path) -> float:
    """Seconds since the last heartbeat, both by the file server's clock."""
    return server_time(path.parent) - path.stat().st_mtime


def lives(process: Process, path: Path) -> bool:
    """Whether the process that renews this file has not ended."""
    alive = process.alive()
    return age(path) < SILENT_S if alive is None else alive


def has_ended(path: Path) -> bool:
    """Whether the process that renews this file has ended, or has removed it; False if that is not certain."""
    try:
        return not lives(Process(**parse(read_bytes(path))), path)
    except FileNotFoundError:
        return True
    except (OSError, TypeError, ValueError):
        return False


def server_time(folder: Path) -> float:
    """The time now by the clock of a folder's files; by this host's clock if nothing can be written."""
    probe = folder / f".now-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _started(pid: int) -> float:
    """Seconds from the boot to a process's start (proc(5), field 22 of stat): psutil's times move when the clock is
    set. ProcessLookupError for a process that has ended and is not collected yet, psutil.Error without such a process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return psutil.Process(pid).create_time()
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def this_place() -> str:
    """This host since its boot, and its namespace of process numbers: those of containers on one host differ."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()
