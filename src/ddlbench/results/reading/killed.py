"""A record that says `running` although no process of its run is left: all were killed, or their host went down."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ddlbench.foreign import parse, read_bytes
from ddlbench.heartbeat import SILENT_S, Process
from ddlbench.record.files import HEARTBEAT

LARGEST_BYTES = 4096  # of a heartbeat
OTHERS_S = 30.0  # after the end of the process that keeps the record, other ranks may still write the end


@dataclass(frozen=True)
class Killed:
    """reason: written to the record; last: time of the last heartbeat, in the record's format"""

    reason: str
    last: str


def find_killed(folder: Path, now: float) -> Killed | None:
    """How the run of a record that says `running` has ended. None if its process may live, or if the record has no
    heartbeat (older versions). The record may have been completed meanwhile: read it again before it counts as killed.

    now: by the clock of the files, in seconds
    """
    try:
        alive, last = keeper_alive(folder), (folder / HEARTBEAT).stat().st_mtime
        when = datetime.fromtimestamp(last, UTC).isoformat(timespec="milliseconds")
    except Exception:  # whatever others have written there
        return None
    silent_s = abs(now - last)  # a clock that was set back must not keep it alive
    if alive or silent_s < (SILENT_S if alive is None else OTHERS_S):
        return None
    how = "its process has ended" if alive is False else f"no heartbeat for {silent_s:.0f} s"
    return Killed(f"no end was recorded and {how}: all ranks were killed at once, or their host went down", when)


def keeper_alive(folder: Path) -> bool | None:
    """Whether the process that keeps a record is alive; None for a process of another host. Raises if the heartbeat is
    missing or invalid."""
    return Process(**parse(read_bytes(folder / HEARTBEAT, LARGEST_BYTES))).alive()
