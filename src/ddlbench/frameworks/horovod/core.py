"""Start Horovod on ranks that torch has connected, with any launcher, without horovodrun; the time of its all-reduces.

Its ranks find each other through a small key-value server, whose address horovodrun gives them in environment variables
(docs of Horovod 0.28, "Horovod with Gloo"; horovod/common/gloo/gloo_context.cc reads them). Here rank 0 runs that
server, and torch's group sends its port to the others. Without the variables every rank would be alone in a world, and
no error would say so.

Its all-reduces run in a thread that torch's profiler does not see (`InFlight`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from ddlbench.frameworks.shared.environment import environment
from ddlbench.job import Job
from ddlbench.measure.devices.usage import count_busy_wait
from ddlbench.measure.profiling.spans import profiling
from ddlbench.ranks.control import all_gather, barrier
from ddlbench.ranks.launchers import HYDRA, OPEN_MPI, PMIX_RANK

NAME = "horovod:all_reduce"  # of the spans


def started_by_mpi() -> bool:
    """Whether an MPI library would find its ranks. torchrun's are not MPI's, even inside a job that is."""
    return "RANK" not in os.environ and any(name in os.environ for name in (OPEN_MPI[0], HYDRA[0], PMIX_RANK))


def start(hvd: Any, job: Job, variables: Mapping[str, str]) -> None:
    """`hvd.init()` with the environment `variables`; all ranks call it. Checks that it found the launch's ranks.

    Once a process: Horovod 0.28.1 crashes in a second `init` after `shutdown` (seen over Gloo), so it stays up until
    the process ends, when it shuts itself down; what it read from the environment stays too."""
    placed = "HOROVOD_RANK" in os.environ or (hvd.mpi_built() and started_by_mpi()) or job.world_size == 1
    if hvd.is_initialized():
        pass
    elif placed:  # by horovodrun, by MPI, or this is the only rank
        with environment(variables):
            hvd.init()
    else:
        with rendezvous(job.rank) as places, environment({**variables, **places}), delayed_abort():
            hvd.init()
            barrier()  # the server of rank 0 must run until every rank has started
    assert hvd.size() == job.world_size, f"Horovod has {hvd.size()} ranks, the launch {job.world_size}"
    assert hvd.rank() == job.rank, f"Horovod calls this rank {hvd.rank()}, the launcher {job.rank}"


@contextmanager
def delayed_abort() -> Generator[None]:
    """An abort of this process waits for six seconds, in which run/supervisor.py records the end of the run. Where
    another rank ends while Horovod starts, Horovod's thread aborts the process at once: it does not catch gloo's
    exceptions there (gloo_context.cc, Initialize). The handler of SIGABRT is sleep(3), which a signal handler may call:
    it takes the signal's number, 6, as seconds. A handler in Python runs only after the abort."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)


@contextmanager
def rendezvous(rank: int) -> Generator[dict[str, str]]:
    """The variables that give a rank its place and the address of the others; rank 0 runs the server meanwhile."""
    server: Any = None
    if rank == 0:  # Horovod's own server on a free port, in a thread
        from horovod.runner.http.http_server import (  # pyright: ignore[reportMissingImports]
            RendezvousHandler,
            RendezvousHTTPServer,
        )

        server = RendezvousHTTPServer(("", 0), RendezvousHandler, 0)
        threading.Thread(target=server.serve_forever, args=(0.05,), name="horovod-rendezvous", daemon=True).start()
    try:
        met = all_gather((socket.gethostname(), server.server_address[1] if server else 0))
        hosts, port = [host for host, _ in met], met[0][1]
        yield {**places(hosts, rank), **meeting(port)}
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def places(hosts: list[str], rank: int) -> dict[str, str]:
    """The position of `rank`; hosts: the host of each rank. "Local" counts the ranks of a host, "cross" the hosts that
    have a rank of the same local number, in order of their lowest ranks."""
    local = hosts[:rank].count(hosts[rank])
    across = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local]
    numbers = {
        "RANK": rank,
        "SIZE": len(hosts),
        "LOCAL_RANK": local,
        "LOCAL_SIZE": hosts.count(hosts[rank]),
        "CROSS_RANK": across.index(hosts[rank]),
        "CROSS_SIZE": len(across),
        "HOSTNAME": hosts[rank],
    }
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}


def meeting(port: int) -> dict[str, str]:
    """Where the server is: on the host that all ranks reached before. The interface is the one chosen for torch."""
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    while not hasattr(store, "host"):  # wrapped in prefixes
        store = store.underlying_store
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": socket.gethostbyname(store.host),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface and "HOROVOD_GLOO_IFACE" not in os.environ:
        variables["HOROVOD_GLOO_IFACE"] = interface
    return variables


class InFlight:
    """Spans of all-reduces, and how long the training thread waits for them, because it does so without sleeping
    (`WaitAndClear` in Horovod 0.28.1, horovod/torch/mpi_ops_v2.cc). In the place of two functions of Horovod's
    optimizers; while no profiler is on it times the waits alone.

    A span begins when a gradient is handed to Horovod. Its end is seen when the rank waits for this gradient, or when
    the next gradient is handed over: within a backward pass it is late by at most the time between two gradients. On
    CUDA the kernels of NCCL are counted instead.

    library: horovod.torch.optimizer
    poll: whether the all-reduce of a handle has ended
    open: handles in the order of their start, each with its span
    """

    def __init__(self, library: Any, poll: Any) -> None:
        self.start, self.wait, self.poll = library.allreduce_async_, library.synchronize, poll
        self.open: dict[int, AbstractContextManager[object]] = {}
        library.allreduce_async_, library.synchronize = self.started, self.waited

    def started(self, *args: Any, **kwargs: Any) -> int:
        handle: int = self.start(*args, **kwargs)
        if profiling():
            # They end nearly in the order of their start: asking for all of them would cost more than it shows.
            for earlier in list(self.open):
                if not self.poll(earlier):
                    break
                self._end(earlier)
            self.open[handle] = record_function(NAME)
            self.open[handle].__enter__()
        return handle

    def waited(self, handle: int) -> Any:
        began = time.perf_counter()
        result = self.wait(handle)
        count_busy_wait(time.perf_counter() - began)
        self._end(handle)
        return result

    def _end(self, handle: int) -> None:
        span = self.open.pop(handle, None)
        if span is not None:
            span.__exit__(None, None, None)


def trace_horovod() -> None:
    """Once a process, however many models are trained in it."""
    library = import_module("horovod.torch.optimizer")
    if not isinstance(getattr(library.synchronize, "__self__", None), InFlight):
        InFlight(library, import_module("horovod.torch.mpi_ops").poll)
