"""Why a run ended: what an exception is called in the record, and which exceptions another rank may have caused."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ddlbench.errors import STATUSES, RunError

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")  # CUDA and NCCL, torch's CPU, cuBLAS
TIMEOUT = ("timed out", "timeout")
# What the libraries say where a peer is gone: gloo, NCCL, the rendezvous store, Horovod.
BROKEN = ("connection", "broken pipe", "gloo", "nccl", "socket", "store", "horovod")
WORKER = re.compile(r"DataLoader worker \(pid")


@dataclass(frozen=True)
class Failure:
    """Why a run ended: status and reason for the record, exit code for the process.

    doubtful: it may be the consequence of another rank's end
    ended_by: SIGNAL or TIME_LIMIT where the run did not end by itself
    """

    status: str
    reason: str
    exit_code: int
    rank: int
    doubtful: bool = False
    ended_by: str | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """The status of an exception; out-of-memory and timeout errors of libraries are found by their words."""
        if isinstance(error, RunError):
            return cls(error.status, str(error), error.exit_code, rank, ended_by=error.ended_by)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {' '.join(lines[:2])}".removesuffix(": ")
        words = f"{type(error).__name__}: {error}".lower()
        if WORKER.search(str(error)):
            return cls.with_status("error", f"rank {rank}: {worker_died(str(error))}", rank)
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in words for word in OUT_OF_MEMORY):
            return cls.with_status("oom", f"rank {rank}: {text}", rank)
        if any(word in words for word in TIMEOUT):
            reason = f"rank {rank}: {text} (the limit is train.timeout_s)"
            return cls.with_status("timeout", reason, rank, doubtful=True)
        return cls.with_status("error", f"rank {rank}: {text}", rank, any(word in words for word in BROKEN))

    @classmethod
    def with_status(
        cls, status: str, reason: str, rank: int, doubtful: bool = False, ended_by: str | None = None
    ) -> Failure:
        """With the exit code of its status."""
        return cls(status, reason, STATUSES[status].exit_code, rank, doubtful, ended_by)


def worker_died(message: str) -> str:
    """What DataLoader says of a worker process that ended, as one line with the remedy."""
    number = re.search(r"pid(?:\(s\))? ([\d, ]+)", message)
    by = re.search(r"killed by signal: ([\w ]+)", message)
    how = f"was killed by signal {by[1].strip()!r}" if by else "ended unexpectedly"
    return (
        f"a loader worker process (pid {number[1].strip() if number else '?'}) {how}: if the node ran out of memory "
        "(see its system log), lower loader.workers or loader.prefetch, or ask for more memory"
    )
