"""Why a run ended: what an exception is called in the record, and which exceptions another rank may have caused."""

from __future__ import annotations

import re

import torch

from ddlbench.errors import Failure, RunError

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")  # CUDA and NCCL, torch's CPU, cuBLAS
TIMEOUT = ("timed out", "timeout")
# What the libraries say where a peer is gone: gloo, NCCL, the rendezvous store, Horovod.
BROKEN = ("connection", "broken pipe", "gloo", "nccl", "socket", "store", "horovod")


def failure_of(error: BaseException, rank: int) -> Failure:
    """The status of an exception; out-of-memory and timeout errors of libraries are recognized by their words."""
    if isinstance(error, RunError):
        return Failure(error.status, str(error), error.exit_code, rank, ended_by=error.ended_by)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:2])}".removesuffix(": ")
    words = f"{type(error).__name__}: {error}".lower()
    if "DataLoader worker (pid" in str(error):
        number = re.search(r"pid(?:\(s\))? ([\d, ]+)", str(error))
        by = re.search(r"killed by signal: ([\w ]+)", str(error))
        how = f"was killed by signal {by[1].strip()!r}" if by else "ended unexpectedly"
        reason = (
            f"rank {rank}: a loader worker process (pid {number[1].strip() if number else '?'}) {how}: if the node ran "
            "out of memory (see its system log), lower loader.workers or loader.prefetch, or ask for more memory"
        )
        return Failure.with_status("error", reason, rank)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in words for word in OUT_OF_MEMORY):
        return Failure.with_status("oom", f"rank {rank}: {text}", rank)
    if any(word in words for word in TIMEOUT):
        reason = f"rank {rank}: {text} (the limit is train.timeout_s)"
        return Failure.with_status("timeout", reason, rank, doubtful=True)
    return Failure.with_status("error", f"rank {rank}: {text}", rank, any(word in words for word in BROKEN))
