"""Start gloo processes once a world size, run a function in every one, and never wait for a hang."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, NoReturn

import torch

from ddlbench.ranks.launchers import free_port, rank_variables
from tests.support.waiting import WITHIN_S


def fork(work: Callable[..., object], *args: Any) -> BaseProcess:
    """A process that runs `work(*args)`, forked from one that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    process = context.Process(target=work, args=args)
    process.start()
    return process


class Forked:
    """A forked process that stands for a program of its own, with what the tests need of Popen. What it returns is its
    exit code; its variables are those of this process and `variables`."""

    def __init__(self, main: Callable[..., int], *args: Any, **variables: str) -> None:
        self.stderr = NamedTemporaryFile("r")  # noqa: SIM115 (until `communicate`)
        self.process = fork(_program, self.stderr.name, {**os.environ, **variables}, main, args)
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        with self.stderr:
            return "", self.stderr.read()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()


def _program(stderr: str, environment: dict[str, str], main: Callable[..., int], args: tuple[Any, ...]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a server that a loader started blocks signals
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(*args))


def run_ranks(
    world: int, work: Callable[..., Any], *args: Any, timeout_s: float = WITHIN_S, open_files: int | None = None
) -> list[Any]:
    """`work(*args)` in `world` processes that are connected by gloo; what each returned, by rank. open_files: their
    soft limit as they start."""
    with TemporaryDirectory() as folder:
        port = free_port()
        processes = [fork(_rank, rank, world, port, folder, open_files, work, args) for rank in range(world)]
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


def results(works: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each piece of work returns: `run_ranks(2, results, WORK)` does all in one set of processes."""
    return {name: work() for name, work in works.items()}


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
