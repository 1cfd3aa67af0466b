"""What the kernel counts of a process, of its training thread and of its node: CPU time, bytes that were read or sent,
and how busy the node is with other work."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddlbench.cores import machine_cores
from ddlbench.measure.devices.unknown import difference, or_none, total

PROC = Path("/proc")
HZ = os.sysconf("SC_CLK_TCK")  # ticks a second
BUSY = (0, 1, 2, 5, 6)  # user nice system irq softirq
INTERNET = (socket.AF_INET, socket.AF_INET6)
BYTES_ACKED = 120  # offset of tcpi_bytes_acked in struct tcp_info (linux/tcp.h)
_busy_wait_s = 0.0  # of the training thread, the only one that waits in this way


@dataclass(frozen=True)
class Load:
    """One node at one moment; None for what its kernel does not report.

    load:     load average of one minute / cores of the node
    pressure: share of the last 10 s in which some process waited for a core
    ticks:    of all cores since the node's start: those that the hypervisor gave to others, those in which processes
              computed, and all
    own_s:    seconds of a core that the processes of the run's ranks on this node computed, since their starts
    """

    load: float | None
    pressure: float | None
    ticks: tuple[int, int, int] | None
    own_s: float | None = None

    @classmethod
    def now(cls, proc: Path = PROC) -> Load:
        # user nice system idle iowait irq softirq steal guest guest_nice (proc(5)); guests' time is in user and nice
        ticks = or_none(lambda: list(map(int, (proc / "stat").read_text().splitlines()[0].split()[1:])))
        return cls(
            load=or_none(lambda: float((proc / "loadavg").read_text().split()[0]) / machine_cores()),
            # "some avg10=1.23 avg60=... avg300=... total=...", in percent
            pressure=or_none(
                lambda: float((proc / "pressure/cpu").read_text().split("some avg10=")[1].split()[0]) / 100
            ),
            ticks=(ticks[7], sum(ticks[state] for state in BUSY), sum(ticks[:8])) if ticks else None,
        )

    def shares_since(self, earlier: Load) -> tuple[float | None, float | None]:
        """Shares of the cores' time: what the hypervisor gave to others, and what processes outside the run used."""
        if self.ticks is None or earlier.ticks is None or self.ticks[2] <= earlier.ticks[2]:
            return None, None
        stolen, busy, passed = (now - before for now, before in zip(self.ticks, earlier.ticks, strict=True))
        of_run_s = difference(earlier.own_s, self.own_s)
        return max(0, stolen) / passed, None if of_run_s is None else max(0.0, busy - of_run_s * HZ) / passed


def process_tree_seconds(proc: Path = PROC, process: str = "self") -> float:
    """Seconds of a core that a process, its living children and those that it has waited for computed since their
    starts. Raises OSError where the kernel does not say which children it has. It reads few files, unlike ReadBytes,
    because a reading within an epoch of mode=loader counts as bytes that were read."""
    folder = proc / process
    words = (folder / "stat").read_text().rpartition(")")[2].split()
    seconds = sum(map(int, words[11:15])) / HZ  # utime stime cutime cstime (proc(5)), after pid and (name)
    # A thread may end meanwhile: the kernel gives its children to another thread.
    lists = [or_none(children.read_text) for children in folder.glob("task/*/children")]
    if all(children is None for children in lists):
        raise FileNotFoundError(f"{folder}/task/*/children")
    for child in (child for children in lists for child in (children or "").split()):
        seconds += or_none(lambda child=child: process_tree_seconds(proc, child)) or 0.0  # it may end meanwhile
    return seconds


def thread_seconds() -> float:
    """Seconds since the start of this thread, the training thread, in which it computed, or was ready and waited for a
    core. Waiting for another rank or for a disk is not in it, nor sleep. Raises OSError where the kernel does not
    say."""
    computed, waited, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return (int(computed) + int(waited)) / 1e9 - _busy_wait_s


def count_busy_wait(seconds: float) -> None:
    """The training thread waited these seconds for others without sleeping: the kernel counts them as computing."""
    global _busy_wait_s
    _busy_wait_s += seconds


@dataclass(frozen=True)
class SentBytes:
    """Bytes that the open TCP connections of this process have sent since they were made, as their receivers have
    acknowledged them (tcpi_bytes_acked of tcp(7)): gloo and MPI over TCP, between ranks of one node as well.

    counts: of each connection, by its two addresses
    """

    counts: Mapping[tuple[Any, Any], int]

    @classmethod
    def now(cls) -> SentBytes:
        """Raises OSError or struct.error where the kernel does not count them (before Linux 4.1). It asks the sockets
        themselves: a file in /proc, which lists all connections of the node, would count as bytes that were read."""
        counts: dict[tuple[Any, Any], int] = {}
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor has just been closed, or is a socket without a peer
                if not descriptor.is_socket():
                    continue
                with socket.socket(fileno=os.dup(int(descriptor.name))) as opened:
                    if opened.family in INTERNET and opened.type == socket.SOCK_STREAM:
                        addresses = opened.getsockname(), opened.getpeername()
                        info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
                        counts[addresses] = struct.unpack_from("Q", info, BYTES_ACKED)[0]
        return cls(counts)

    def since(self, earlier: SentBytes) -> int | None:
        """None where a connection has been closed since then: its last bytes are not known."""
        if not earlier.counts.keys() <= self.counts.keys():
            return None
        return sum(self.counts.values()) - sum(earlier.counts.values())


@dataclass(frozen=True)
class ReadBytes:
    """Bytes since the start of this process and its descendants.

    count: bytes that read(2) and similar calls returned (proc(5): rchar), from the page cache or a disk. A mapped file
           is read without such a call and does not count. None where the kernel does not report it
    overhead: of these, the bytes that this measurement itself reads
    """

    count: int | None
    overhead: int = 0

    @classmethod
    def now(cls) -> ReadBytes:
        process = psutil.Process()
        first = _read_bytes(process)
        counts = [first]
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                counts.append(_read_bytes(child))
        overhead = (_read_bytes(process) or 0) - (first or 0)
        return cls(total(counts), overhead)

    def since(self, earlier: ReadBytes) -> int | None:
        return None if self.count is None or earlier.count is None else self.count - earlier.count - earlier.overhead


def _read_bytes(process: psutil.Process) -> int | None:
    try:
        return process.io_counters().read_chars
    except psutil.AccessDenied:
        return None
