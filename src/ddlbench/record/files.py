"""The files of a record: the names of those that exist only during a run, and how JSON is written. If rank 0 has not
written the end of a run, another process writes it, or a reader sees from the heartbeat that the run was killed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ddlbench.credentials import LEFT_OUT, may_hold_credential
from ddlbench.files import remove_leftovers, replace_json
from ddlbench.foreign import parse, read_bytes
from ddlbench.heartbeat import SILENT_S, Process, server_time

RESERVE = ".reserve"  # holds space for the last run.json
HEARTBEAT = ".heartbeat"  # which process keeps the record, and when it lived
CLAIM = ".end-by-another-rank"  # the process that made it writes the end in the place of rank 0
COLLECTIVES = "collectives"  # a folder with the last collectives of each rank of a run that hung
DEAD_CLAIM_S = 30.0  # a claim that is older was made by a process that has exited before it wrote the end
LARGEST_HEARTBEAT = 4096  # bytes
OTHERS_S = 30.0  # so long after the end of the process that keeps the record, other ranks may still write the end


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by this content, as `plain` makes it."""
    replace_json(path, plain(content), through=path.parent)


def plain(value: Any) -> Any:
    """The value for JSON, without texts and keys that may have a credential; a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[Any], value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return LEFT_OUT if isinstance(value, str) and may_hold_credential(value) else value


def end_for_rank_0(
    folder: Path, status: str, reason: str, ended: str | None = None, ended_by: str | None = None
) -> bool:
    """Write the end into run.json in the place of rank 0: from another rank, or from a sweep if no rank is left.
    Returns whether this call did: only one process does, and `running` stays if the folder cannot be reached.

    ended: when, if not now; ended_by: of errors.py
    """
    try:
        content, claim = json.loads((folder / "run.json").read_text()), folder / CLAIM
        if content["status"] != "running":
            return False
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:  # another process writes it, unless it was killed before it could
            if abs(server_time(folder) - claim.stat().st_mtime) <= DEAD_CLAIM_S:
                return False
        content |= {"status": status, "reason": reason, "ended_by": ended_by}
        content["times"]["end"] = ended or now()
        write_json(folder / "run.json", content)
        remove_leftovers(folder, "run.json")
        for name in (RESERVE, HEARTBEAT):
            (folder / name).unlink(missing_ok=True)
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find_killed(folder: Path) -> tuple[str, str] | None:
    """How a run whose record says `running` has ended: the reason, and the time of the last heartbeat in the format of
    the record. None if its process may be alive, or if the record has no heartbeat (older versions). The end may be
    written at this moment: read the record again before it counts as killed."""
    try:
        alive, last = keeper_alive(folder), (folder / HEARTBEAT).stat().st_mtime
        when = datetime.fromtimestamp(last, UTC).isoformat(timespec="milliseconds")
    except Exception:  # whatever others have written there
        return None
    silent_s = abs(server_time(folder) - last)  # a clock that was set back must not keep it alive
    if alive or silent_s < (SILENT_S if alive is None else OTHERS_S):
        return None
    how = "its process has ended" if alive is False else f"no heartbeat for {silent_s:.0f} s"
    return f"no end was recorded and {how}: all ranks were killed at once, or their host went down", when


def keeper_alive(folder: Path) -> bool | None:
    """Whether the process that keeps a record is alive; None if it is on another host. Raises an error if the heartbeat
    is missing or invalid."""
    return Process(**parse(read_bytes(folder / HEARTBEAT, LARGEST_HEARTBEAT))).alive()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
