"""The cores of this process."""

from __future__ import annotations

import os


def allowed_cores() -> list[int]:
    """Numbers of the cores that this process may run on: a task's share under Slurm, else often all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS
