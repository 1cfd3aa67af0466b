"""Start gloo processes once a world size, run a function in every one, and never wait for a hang."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ddlbench.ranks.launchers import free_port, rank_variables
from tests.support.waiting import WITHIN_S


def run_ranks(
    world: int, work: Callable[..., Any], *args: Any, timeout_s: float = WITHIN_S, open_files: int | None = None
) -> list[Any]:
    """`work(*args)` in `world` processes that are connected by gloo; what each returned, by rank. open_files: their
    soft limit as they start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    with TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(target=_rank, args=(rank, world, port, folder, open_files, work, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            return [_result(Path(folder), rank, process.exitcode) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()


def results(works: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    """What each piece of work returns, by its name: `run_ranks(2, results, WORK)` does all in one set of processes."""
    return {work.__name__: work() for work in works}


def _result(folder: Path, rank: int, exitcode: int | None) -> Any:
    failed = folder / f"{rank}.txt"
    if failed.exists():
        raise AssertionError(f"rank {rank} failed:\n{failed.read_text()}")
    assert exitcode == 0, f"rank {rank} " + ("hung" if exitcode is None else f"exited with {exitcode}")
    return torch.load(folder / f"{rank}.pt", weights_only=False)


def _rank(
    rank: int,
    world: int,
    port: int,
    folder: str,
    open_files: int | None,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(rank_variables(rank, world, port), OMP_NUM_THREADS="1")
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a server that a loader started blocks signals
    from ddlbench.ranks.launch import connect, disconnect
    from ddlbench.ranks.launchers import detect

    torch.set_num_threads(1)
    try:
        connect(detect(), torch.device("cpu"), 120.0)
        torch.save(work(*args), Path(folder) / f"{rank}.pt")
        disconnect(clean=True)
    except BaseException:
        (Path(folder) / f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
