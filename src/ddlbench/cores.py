"""The cores of this process and of a rank, and the default number of a loader's workers or threads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction

from ddlbench.texts import counted

MOST = {"cpu": 8, "cuda": 16}  # workers: what a file system and /dev/shm carry for every rank of a node
ON_CUDA = 2  # threads of a rank that are busy beside its loader: one queues the device's work, one pins batches


def machine_cores() -> int:
    """Cores of this machine, including those that this process may not use."""
    return os.cpu_count() or 1


def allowed_cores() -> list[int]:
    """Numbers of the cores that this process may run on: under Slurm those of the task, else often all cores."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(machine_cores()))  # macOS


def fewest_cores(ranks: Sequence[tuple[str, Collection[int]]]) -> int:
    """The cores of the rank that has the fewest for itself, at least 1. Ranks that may run on the same core share it:
    four ranks that may run on the same 8 cores have 2 each. ranks: of each its host and the cores that it may run on
    """
    users = Counter((host, core) for host, cores in ranks for core in cores)
    shared = (Counter(users[host, core] for core in cores) for host, cores in ranks)  # cores by how many share one
    shares = [sum(Fraction(count, by) for by, count in of_rank.items()) for of_rank in shared]
    return max(1, int(min(shares)))


def default_workers(cores: int, device_type: str, threads: int) -> int:
    """One for each core that the rank itself leaves free, at least 1; threads: those of a rank on the CPU."""
    busy = threads if device_type == "cpu" else ON_CUDA
    return min(MOST[device_type], max(1, cores - busy))


def few_cores(cores: int, workers: int) -> str | None:
    """A remark for users of a GPU; it is not an error."""
    wanted = workers + ON_CUDA
    if cores >= wanted:
        return None
    return (
        f"each rank has {counted(cores, 'core')} for itself; its {workers} loader workers and {ON_CUDA} "
        f"threads of its own want {wanted}: give each rank more (srun --cpus-per-task={wanted})"
    )
