"""What can go wrong with a run, each kind with the status its record gets and the exit code of the program."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ddlbench.texts import first_line


@dataclass(frozen=True)
class Status:
    """How a run ended.

    exit_code: of the rank that failed first; `killed`: 128 + the signal's number, here SIGTERM's
    retry: the values of a sweep's --retry with which a cell of this status runs again
    """

    exit_code: int
    retry: tuple[str, ...] = ()


STATUSES = {
    "ok": Status(0),
    "error": Status(1, ("failed", "all")),
    "unsupported": Status(3, ("all",)),
    "unavailable": Status(4, ("failed", "all")),
    "diverged": Status(5, ("failed", "all")),
    "oom": Status(7, ("oom", "all")),
    "timeout": Status(8, ("failed", "all")),
    "killed": Status(128 + signal.SIGTERM, ("failed", "all")),
}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # each stops the run
# run.json's `ended_by`, null where the run ended by itself. A time limit is train.time_limit_s, or SIGUSR1, which a
# sweep and Slurm (run.sbatch) send at theirs.
SIGNAL, TIME_LIMIT = "signal", "time_limit"
# Words of errors, in lower case. Memory: of CUDA and NCCL, torch's CPU and DALI, the system, cuBLAS, DALI, exceptions.
OUT_OF_MEMORY = ("out of memory", "can't allocate", "cannot allocate memory", "alloc_failed", "cuda allocation failed",
                 "memoryerror")  # fmt: skip
# Of cuDNN's algorithms none fits into what is left, or there is none for this GPU: torch's message does not say which.
NO_ALGORITHM = ("unable to find an engine", "unable to find a valid cudnn algorithm")
TIMEOUT = ("timed out", "timeout")
# A peer is gone: of gloo, NCCL, the rendezvous store, Horovod.
BROKEN = ("connection", "broken pipe", "gloo", "nccl", "socket", "store", "horovod")


@dataclass(frozen=True)
class Failure:
    """Why a run ends: status and reason for the record, exit code for the process.

    doubtful: it may be the consequence of another rank's end
    ended_by: SIGNAL or TIME_LIMIT if the run did not end by itself
    """

    status: str
    reason: str
    exit_code: int
    rank: int
    doubtful: bool = False
    ended_by: str | None = None

    @classmethod
    def with_status(
        cls, status: str, reason: str, rank: int, doubtful: bool = False, ended_by: str | None = None
    ) -> Failure:
        """With the exit code of its status."""
        return cls(status, reason, STATUSES[status].exit_code, rank, doubtful, ended_by)


class RunError(Exception):
    """Ends a run with a status instead of a traceback. A class that names no exit code has that of its status."""

    status = "error"
    exit_code = STATUSES[status].exit_code
    ended_by: str | None = None

    def __init_subclass__(cls) -> None:
        if "status" in vars(cls):
            cls.exit_code = STATUSES[cls.status].exit_code


class UserError(RunError, ValueError):
    """The configuration or the data cannot be used: one line with the values and the remedy."""

    exit_code = 2


ADDED = "added"  # in the metadata of a key of the configuration that a later version added
NONE: Mapping[str, Any] = {}


def added(default: Any) -> Any:
    """The field of a key that a later version added. default: the value that keeps the earlier behavior"""
    return field(default=default, metadata={ADDED: True})


def check_values(
    prefix: str,
    options: object,
    least: Mapping[str, float] = NONE,
    above: Mapping[str, float] = NONE,
    choices: Mapping[str, Collection[object]] = NONE,
    rules: Mapping[str, tuple[bool, str]] = NONE,
) -> None:
    """Raise UserError for a key of a section of the configuration whose value cannot be used. None is always allowed.

    prefix: of the keys in a message: the section with its dot, "" for the keys of no section; options: a dataclass
    least, above: the smallest value of a key; what the value of a key must exceed
    rules: whether the value of a key can be used, and what it must be
    """
    values = {key: value for key, value in vars(options).items() if value is not None}
    wrong = {
        **{key: f"{low} or more" for key, low in least.items() if values.get(key, low) < low},
        **{key: f"greater than {low}" for key, low in above.items() if values.get(key, inf) <= low},
        **{
            key: f"one of {', '.join(map(str, options))}"
            for key, options in choices.items()
            if values.get(key) not in (None, *options)
        },
        **{key: allowed for key, (fits, allowed) in rules.items() if not fits},
    }
    for key, allowed in wrong.items():
        null = ", or null" if getattr(type(options), key, "") is None else ""  # its default
        raise UserError(f"{prefix}{key}={getattr(options, key)} must be {allowed}{null}")


@contextmanager
def reporting(what: str, remedy: str, kind: type[RunError] = UserError) -> Generator[None]:
    """Make an OSError one line for the user: what was not possible, why, and the remedy."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({why(error)}): {remedy}") from error


def why(error: OSError) -> str:
    """The system's message, also where a library has replaced it by its own."""
    return os.strerror(error.errno) if error.errno else str(error)


class WrongRankCount(UserError):
    """The batch or the layout does not fit this number of ranks; with another number the configuration may be right."""


class Unsupported(RunError):
    """The framework cannot do what the configuration asks of it."""

    status = "unsupported"


def refuse(name: str, reasons: Mapping[str, object]) -> None:
    """Raise Unsupported with the first reason whose condition holds. name: of what refuses"""
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(f"{name}: {reason}")


class Unavailable(RunError):
    """A library is missing on this machine: the message says how to install it."""

    status = "unavailable"


@contextmanager
def importing(library: str, remedy: str) -> Generator[None]:
    """Make any error of an import one line for the user: libraries also look for compilers, drivers and other
    libraries, and fail in many ways."""
    try:
        yield
    except Exception as error:
        raise Unavailable(f"{library} cannot be imported ({first_line(error)}): {remedy}") from error


class Diverged(RunError):
    """The loss is no longer a finite number."""

    status = "diverged"


class PeerFailed(RunError):
    """Another rank failed first; the message is that rank's."""

    exit_code = 6


class Stopped(RunError):
    """All ranks stopped at one boundary, as one of them asked: after a signal, or at the run's time limit."""

    status = "killed"

    def __init__(self, cause: Failure, where: str) -> None:
        """where: as in "after step 3 of epoch 0" """
        super().__init__(f"{cause.reason}; stopped {where}")
        self.status, self.exit_code, self.ended_by = cause.status, cause.exit_code, cause.ended_by


def failure_of(error: BaseException, rank: int) -> Failure:
    """Why an exception ends the run; out-of-memory and timeout errors of libraries are recognized by their words."""
    if isinstance(error, RunError):
        return Failure(error.status, str(error), error.exit_code, rank, ended_by=error.ended_by)
    message = str(error)
    if "\nOriginal Traceback" in message:  # of a loader worker or a thread: torch adds the traceback to the message
        caught, *_, cause = message.strip().splitlines()
        message = f"{caught}\n{cause}"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:2])}".removesuffix(": ")
    words = f"{type(error).__name__}: {message}".lower()
    if "DataLoader worker (pid" in message:
        number = re.search(r"pid(?:\(s\))? ([\d, ]+)", message)
        by = re.search(r"killed by signal: ([\w ]+)", message)
        how = f"was killed by signal {by[1].strip()!r}" if by else "ended unexpectedly"
        reason = (
            f"rank {rank}: a loader worker process (pid {number[1].strip() if number else '?'}) {how}: if the node ran "
            "out of memory (see its system log), lower loader.workers or loader.prefetch, or ask for more memory"
        )
        return Failure.with_status("error", reason, rank)
    if "more than 1 value per channel" in message:
        text += ": BatchNorm needs more samples in a micro batch (train.micro_batch), or a larger model.image_size"
    ran_out = any(word in words for word in OUT_OF_MEMORY)
    if any(word in words for word in NO_ALGORITHM):  # the allocator of this process's GPU knows
        import torch

        ran_out = ran_out or (torch.cuda.is_initialized() and torch.cuda.memory_stats()["num_ooms"] > 0)
    if ran_out:
        return Failure.with_status("oom", f"rank {rank}: {text}", rank)
    if any(word in words for word in TIMEOUT):
        reason = f"rank {rank}: {text} (the limit is train.timeout_s)"
        return Failure.with_status("timeout", reason, rank, doubtful=True)
    return Failure.with_status("error", f"rank {rank}: {text}", rank, any(word in words for word in BROKEN))
