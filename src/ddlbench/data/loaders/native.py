"""PyTorch's own DataLoader for every data set: worker processes read complete batches."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from ddlbench.cores import default_workers
from ddlbench.data.feed import Dataset, Fetched, Loader, Request, Split
from ddlbench.data.loaders.replica_feed import Indices, ReplicaFeed, normalized
from ddlbench.data.processes import end_with_parent
from ddlbench.errors import RunError, check_values
from ddlbench.measure.devices.memory import keep_freed_memory

TO_THE_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDS_S = 5.0  # the longest wait for the end of a worker that broke its connection
TERM_S = 20  # a rank that received SIGTERM too has stopped by then (ranks/boundary.py)
# Imported once by the server: besides what reads samples, what every worker's copy of the main module imports.
PRELOADED = ("ddlbench.config.compose", "ddlbench.ranks.launch", __name__)


@dataclass
class Native(Loader):
    """Reads every data set.

    workers: processes per rank and split; None: as in cores.py if samples are decoded or tokenized, else 0: the
        rank reads, since slicing a memory map is faster than sending the result
    prefetch: batches each worker keeps ready; pin_memory: page-locked batches, on CUDA devices only
    persistent: keep the workers between epochs
    """

    drops_cache: ClassVar[bool] = True
    decodes_on_host: ClassVar[bool] = True
    parallel_key: ClassVar[str | None] = "workers"

    name: str
    workers: int | None = None
    prefetch: int = 2
    pin_memory: bool = True
    persistent: bool = True

    def __post_init__(self) -> None:
        check_values("loader.", self, least={"workers": 0, "prefetch": 1})

    @property
    def pinned(self) -> bool:
        return self.pin_memory

    def open(self, dataset: Dataset, request: Request) -> ReplicaFeed:
        usual = default_workers(request.cores, request.device.type, torch.get_num_threads()) if dataset.costly else 0
        workers = usual if self.workers is None else self.workers
        pin = self.pin_memory and request.device.type == "cuda"
        settings = replace(self, workers=workers, pin_memory=pin)
        splits = [dataset.split(train, request.model, request.seed) for train in (True, False)]
        train, validation = (Reader(split, settings, request.device.type == "cpu") for split in splits)
        if workers and request.place.reads_data:
            # The modules that define the split and its parts: a worker imports them to read the split's pickle.
            parts = (splits[0], *vars(splits[0]).values())
            start_server(*sorted({type(part).__module__ for part in parts} - {"builtins"}))
        return ReplicaFeed(train, validation, request, settings, ahead=workers * self.prefetch)


class Reader:
    """One split and its DataLoader. No worker starts before the first `read`.

    normalize: images, where they are read; else they stay uint8, for a device that normalizes them
    """

    def __init__(self, split: Split, settings: Native, normalize: bool) -> None:
        self.split = split
        self._batches: list[tuple[int, Indices]] = []  # of an epoch: workers may outlive it
        parallel: dict[str, Any] = {
            "num_workers": settings.workers,
            "multiprocessing_context": "forkserver",
            "prefetch_factor": settings.prefetch,
            "persistent_workers": settings.persistent,
            "worker_init_fn": begin_worker,
        }
        self._loader: DataLoader[Any] = DataLoader(
            SplitInWorker(split, normalize),  # pyright: ignore[reportArgumentType]
            batch_size=None,  # the split makes the batches
            sampler=self._batches,
            pin_memory=settings.pin_memory,
            generator=torch.Generator(),  # else it would draw from the stream that dropout draws from
            **(parallel if settings.workers else {}),
        )
        self._iterator: Any = None

    def read(self, epoch: int, batches: Iterable[Indices]) -> Iterator[Fetched]:
        """Raises the error that the split raised, and RuntimeError where a worker has ended."""
        self._batches[:] = [(epoch, batch) for batch in batches]
        self._iterator = iter(self._loader)
        try:
            for answer in self._iterator:
                if isinstance(answer, RunError):
                    raise answer
                yield answer
        # DataLoader does not see which signal ended a process of another parent. A worker that ends between a batch and
        # its memory breaks the connection before DataLoader sees that it has ended.
        except (RuntimeError, ConnectionError, EOFError) as error:
            workers = getattr(self._iterator, "_workers", ())
            if not isinstance(error, RuntimeError):
                connection.wait([worker.sentinel for worker in workers], timeout=ENDS_S)
            for worker in workers:
                if (worker.exitcode or 0) < 0:
                    by = signal.strsignal(-worker.exitcode)
                    raise RuntimeError(f"DataLoader worker (pid {worker.pid}) is killed by signal: {by}") from error
            raise

    def close(self) -> None:
        """Stop the workers now: an iterator or a traceback that still exists would keep them alive."""
        stop = getattr(self._iterator, "_shutdown_workers", None)
        if stop is not None:
            stop()
        self._iterator = None


@dataclass(frozen=True)
class SplitInWorker:
    """A split in a worker process. It returns errors as values: a raised error would reach the rank as a traceback."""

    split: Split
    normalize: bool

    def __getitem__(self, batch: tuple[int, Indices]) -> Fetched | RunError:
        epoch, indices = batch
        try:
            fetched = self.split.__getitems__([(epoch, int(index)) for index in indices] or [(0, 0)])
        except RunError as error:
            return error
        if not len(indices):  # a replica whose validation shard ends before the others' still has to give a batch
            fetched = Fetched(fetched.inputs[:0], fetched.targets[:0], fetched.valid[:0])
        images = self.normalize and fetched.inputs.dtype == torch.uint8
        return fetched._replace(inputs=normalized(fetched)) if images else fetched


@cache
def start_server(*modules: str) -> None:
    """Start the process that forks the workers, once a rank, and wait until it has imported what they need.

    It has one thread. A fork of the rank would copy the locks that the rank's other threads (gloo's, the rendezvous
    store's) hold at that moment, and nobody would release them in the worker (docs/adr/0020). Signals to the whole job
    are blocked in the server, and in a worker until it handles them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *modules])
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):  # the tracker's start unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, TO_THE_JOB)
        try:
            start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    first = context.Process(target=int)
    first.start()
    first.join()


def begin_worker(_: int) -> None:
    """The rank decides when to stop: a signal that is sent to the whole job must not make a worker's death look like
    the failure, and the rank may need more batches to reach the end of a step. (DataLoader itself sets one thread a
    worker.) It keeps freed memory, as a rank on the CPU does (ADR 6).
    """
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, file=2)  # where it is, when its rank has waited too long (run/supervisor.py)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(TERM_S))  # DataLoader sends it to a worker that hangs
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_THE_JOB)
    keep_freed_memory()
    end_with_parent(0)
