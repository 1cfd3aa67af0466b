"""PyTorch's own DataLoader for every data set: worker processes read whole batches, from the keys of each epoch."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ddlbench.data.feed import Dataset, Fetched, Request, Split
from ddlbench.data.images.split import normalized
from ddlbench.data.loaders.cores import default_workers
from ddlbench.data.loaders.replica_feed import Key, ReplicaFeed
from ddlbench.errors import RunError, UserError
from ddlbench.job import Model
from ddlbench.measure.allocator import keep_freed_memory

START_METHODS = ("fork", "spawn", "forkserver")
FACTS = ("workers", "prefetch", "pin_memory", "persistent", "start_method")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Native:
    """workers: processes per rank and split; None: as in cores.py if samples are decoded or tokenised, else 0: the
        rank reads, since slicing a memory map is faster than sending the result
    prefetch: batches each worker keeps ready; pin_memory: page-locked batches, on CUDA devices only
    persistent: keep the workers between epochs; start_method: of the workers, None: Python's default
    """

    name: str
    workers: int | None = None
    prefetch: int = 2
    pin_memory: bool = True
    persistent: bool = True
    start_method: str | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise UserError(f"loader.workers={self.workers} must not be negative: 0 or more, or null for the default")
        if self.prefetch < 1:
            raise UserError(f"loader.prefetch={self.prefetch} must be 1 or more batches per worker")
        if self.start_method not in (None, *START_METHODS):
            raise UserError(
                f"loader.start_method={self.start_method} is unknown: choose null or one of {', '.join(START_METHODS)}"
            )

    @property
    def scored(self) -> bool:
        return True

    def check(self, dataset: Dataset, model: Model) -> None:
        """Reads every data set."""

    def open(self, dataset: Dataset, request: Request) -> ReplicaFeed:
        usual = default_workers(request.cores, request.device.type, torch.get_num_threads()) if dataset.costly else 0
        workers = usual if self.workers is None else self.workers
        pin = self.pin_memory and request.device.type == "cuda"
        settings = replace(self, workers=workers, pin_memory=pin)
        splits = (dataset.split(train, request.model, request.seed) for train in (True, False))
        train, validation = (Reader(split, settings, request.device.type == "cpu") for split in splits)
        return ReplicaFeed(train, validation, request, settings.facts())

    def facts(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in FACTS}


class Reader:
    """One split behind one DataLoader. No process starts before the first `read`.

    normalize: images, where they are read; else they stay uint8, for a device that normalises them
    """

    def __init__(self, split: Split, settings: Native, normalize: bool) -> None:
        self.split = split
        self._keys = EpochKeys()
        self._loader: DataLoader[Any] = data_loader(SplitInWorker(split, normalize), self._keys, settings)
        self._iterator: Any = None

    def read(self, batches: Iterable[list[Key]]) -> Iterator[Fetched]:
        """The batches in their order; for an empty list of keys, no samples of the right shape.

        Raises the error that the split raised.
        """
        self._keys.batches = batches
        with kept_by_workers():
            self._iterator = iter(self._loader)
        for answer in self._iterator:
            if isinstance(answer, RunError):
                raise answer
            yield Fetched(*answer)

    def close(self) -> None:
        """Stop the workers now: an iterator or a traceback that still exists would keep them alive."""
        stop = getattr(self._iterator, "_shutdown_workers", None)
        if stop is not None:
            stop()
        self._iterator = None


@contextmanager
def kept_by_workers() -> Generator[None]:
    """Forked workers never collect garbage that they inherit from the rank: it may end in a destructor that waits for a
    thread which only the rank has (gloo's, the rendezvous store's), and such a worker would give no batch."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class EpochKeys:
    """DataLoader's `batch_sampler`, with other batches each epoch: its workers may outlive an epoch."""

    batches: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.batches)


@dataclass(frozen=True)
class SplitInWorker:
    """A split in a worker process. It returns errors as values: a raised error would reach the rank as a traceback."""

    split: Split
    normalize: bool

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]] | RunError:
        try:
            fetched = self.split.__getitems__(keys) if keys else nothing_of(self.split)
        except RunError as error:
            return error
        images = self.normalize and fetched.inputs.dtype == torch.uint8
        inputs = normalized(fetched) if images else fetched.inputs
        return inputs, fetched.targets, fetched.valid, fetched.bad


def nothing_of(split: Split) -> Fetched:
    """Zero samples: a replica whose validation shard ends before the others' still has to give a batch."""
    one = split.__getitems__([(0, 0)])
    return Fetched(one.inputs[:0], one.targets[:0], one.valid[:0])


def data_loader(split: SplitInWorker, keys: EpochKeys, settings: Native) -> DataLoader[Any]:
    workers = settings.workers or 0
    parallel: dict[str, Any] = {
        "multiprocessing_context": settings.start_method,
        "prefetch_factor": settings.prefetch,
        "persistent_workers": settings.persistent,
        "worker_init_fn": begin_worker,
    }
    return DataLoader(
        split,  # pyright: ignore[reportArgumentType]  # DataLoader asks for no more than __getitems__
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=as_it_is,
        pin_memory=settings.pin_memory,
        generator=torch.Generator(),  # else it would draw from the stream that dropout draws from
        **(parallel if workers else {}),
    )


def as_it_is(answer: Any) -> Any:
    return answer


def begin_worker(_: int) -> None:
    """The rank decides when to stop: a signal sent to the whole job must neither run the rank's handlers, inherited by
    fork, nor make a worker's death look like the failure. (DataLoader itself sets one thread a worker.) It keeps
    freed memory, as a rank on the CPU does (ADR 6)."""
    signal.set_wakeup_fd(-1)  # the rank's: what a forked worker receives would end the rank
    for name in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, file=2)  # where it is, when its rank has waited too long (run/stacks.py)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if sys.platform == "linux":
        # A worker that outlived its rank would hold the rank's sockets open, and the peers would wait for it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    keep_freed_memory()
    threading.Thread(target=leave_with_the_rank, name="rank-watch", daemon=True).start()


def leave_with_the_rank() -> None:
    """A forkserver's worker has the forkserver for its parent, which lives as long as its workers do."""
    rank = multiprocessing.parent_process()
    assert rank is not None, "a worker is a process of its own"
    wait([rank.sentinel])
    os._exit(0)
