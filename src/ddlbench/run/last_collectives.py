"""The last collectives of a rank that hangs, from torch's flight recorder, which keeps the newest 2,000 of each backend
in memory (TORCH_FR_BUFFER_SIZE). report/explain.py compares the ranks."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from torch._C import _distributed_c10d as c10d

from ddlbench.record.files import COLLECTIVES, write_json

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo, and of NCCL where torch has it
KEPT = 4  # of each group
ASK_S = 3.0  # longest wait for the recorder: it asks the driver of a device that may hang


def save_last_collectives(folder: Path, rank: int) -> None:
    """Write them into the attempt's folder. Never raises and never hangs, because the process is about to end."""

    def save() -> None:
        target = folder / COLLECTIVES / f"rank-{rank}.json"
        with suppress(OSError):  # a full disk, or a folder that this node does not reach
            target.parent.mkdir(exist_ok=True)
            write_json(target, {"rank": rank, "host": socket.gethostname(), "collectives": last_collectives()})

    thread = Thread(target=save, name="ddlbench-collectives", daemon=True)
    thread.start()
    thread.join(ASK_S)


def last_collectives() -> list[dict[str, Any]]:
    """The newest collectives and messages of each process group and backend, in the order in which this rank began
    them."""
    groups = defaultdict[Any, list[dict[str, Any]]](list)
    for name in DUMPS:
        dump: dict[str, Any] = json.loads(getattr(c10d, name, lambda: "{}")())
        for entry in dump.get("entries", []):
            groups[name, entry["is_p2p"], *entry["process_group"]].append(entry)
    newest = [entry for entries in groups.values() for entry in entries[-KEPT:]]
    return [
        {
            "group": " ".join(entry["process_group"]),
            # The number of the collective, or of the message, within its group.
            "sequence": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            "message": entry["is_p2p"],  # from one rank to another
            "operation": entry["profiling_name"],
            "input_sizes": entry["input_sizes"],
            "input_dtypes": entry["input_dtypes"],
            "state": entry["state"],
            "done": entry["retired"] or entry["state"] == "completed",  # whether this rank has left it
        }
        for entry in sorted(newest, key=lambda entry: entry["time_created_ns"])
    ]
