"""The end of a run in run.json, where rank 0 does not live to write it."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from ddlbench.files import remove_leftovers
from ddlbench.record.files import CLAIM, HEARTBEAT, RESERVE, write_json

DEAD_CLAIM_S = 30.0  # after so long, the process that claimed to write the end has not lived to do it


def end_for_rank_0(
    folder: Path, status: str, reason: str, ended: str | None = None, ended_by: str | None = None
) -> bool:
    """Another rank, or a sweep where no rank is left, writes the end into run.json, once; whether this call did.
    `running` may stay where the folder cannot be reached from here. ended: when, if not now; ended_by: of
    errors.py"""
    try:
        content = json.loads((folder / "run.json").read_text())
        if content["status"] != "running" or not _claim_end(folder / CLAIM):
            return False
        content |= {"status": status, "reason": reason, "ended_by": ended_by}
        content["times"]["end"] = ended or now()
        write_json(folder / "run.json", content)
        remove_leftovers(folder / "run.json")
        for name in (RESERVE, HEARTBEAT):
            (folder / name).unlink(missing_ok=True)
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _claim_end(claim: Path) -> bool:
    """Whether this process is the one that writes the end: the first, or the next after one that was killed at it."""
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return abs(time.time() - claim.stat().st_mtime) > DEAD_CLAIM_S
    return True


def why(error: OSError) -> str:
    """In the system's words, also where a library has put it in its own."""
    return os.strerror(error.errno) if error.errno else str(error)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
