"""CPU time of a rank and its loader workers, and the bytes that they read with system calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Usage:
    """Since the start of each process; processes that have ended and were waited for are included.

    cpu_s:      CPU seconds, user and system, in ticks of 1/100 s (proc(5))
    read_bytes: bytes that read(2) and its like gave (proc(5): rchar), from the page cache or a disk; a mapped file is
                read without being asked for and is not in it. None where the kernel does not report it.
    look_bytes: of these, the bytes that this measurement itself reads
    """

    cpu_s: float
    read_bytes: int | None
    look_bytes: int = 0

    @classmethod
    def now(cls) -> Usage:
        """Usage of this process and all its descendants."""
        process = psutil.Process()
        first = _read_bytes(process.pid)
        cpu_s, read = sum(process.cpu_times()[:4]), [first]  # user, system, and the same of children that have ended
        for child in process.children(recursive=True):
            try:
                cpu_s += sum(child.cpu_times()[:4])
                read.append(_read_bytes(child.pid))
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
        counts = [count for count in read if count is not None]
        look = (_read_bytes(process.pid) or 0) - (first or 0)
        return cls(cpu_s, sum(counts) if len(counts) == len(read) else None, look)

    def since(self, earlier: Usage) -> Usage:
        """The difference of two measurements."""
        now, then = self.read_bytes, earlier.read_bytes
        used = None if now is None or then is None else now - then - earlier.look_bytes
        return Usage(self.cpu_s - earlier.cpu_s, used)


def _read_bytes(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except PermissionError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))
