"""Run a module on a core of its own: python -m benchmarks.cores MODULE [ARGUMENTS]. Rank 0 has the first core.

Horovod's ranks have two busy threads each, and one of them asks without a pause whether the other is done. Where there
are fewer cores than such threads, a start's speed depends on which threads the scheduler puts beside each other. With a
core for each rank, its threads disturb no other rank.
"""

from __future__ import annotations

import os
import runpy
import sys

LOCAL_RANKS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK")  # of torchrun, of horovodrun


def take_core() -> None:
    """Where the system can do that (Linux)."""
    if hasattr(os, "sched_setaffinity"):
        rank = int(next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), 0))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


if __name__ == "__main__":
    take_core()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
