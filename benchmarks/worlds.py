"""Processes that have met over gloo and wait for work: started once for each number of them, for many measurements.

A process that waits reads from a pipe, and takes nothing from the cores on which others are measured.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ddlbench.ranks.launchers import free_port, rank_variables

TIMEOUT_S = 120.0


class WorkFailed(RuntimeError):
    """A rank raised, ended or did not answer in time: its processes are gone."""


class World:
    """Ranks that all run the same function at once. They are started by the first `run`, and again after a failure."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """What `work(*args)`, a function of a module, returns by rank. WorkFailed for the first rank that fails."""
        self.start()
        for pipe in self._pipes:
            pipe.send((work, args))
        try:
            return self._answers(time.monotonic() + timeout_s)
        except WorkFailed:
            self.close()
            raise

    def start(self) -> None:
        """Does not wait until they have met."""
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.ranks):
            parent_end, rank_end = context.Pipe()
            process = context.Process(target=_rank, args=(rank, self.ranks, port, rank_end), daemon=True)
            process.start()
            rank_end.close()
            self._processes.append(process)
            self._pipes.append(parent_end)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _answers(self, deadline: float) -> list[Any]:
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise WorkFailed(f"rank {rank} of {self.ranks} did not answer in time")
            try:
                fine, answer = pipe.recv()
            except EOFError:
                raise WorkFailed(f"rank {rank} of {self.ranks} ended") from None
            if not fine:
                raise WorkFailed(f"rank {rank} of {self.ranks}: {answer}")
            answers.append(answer)
        return answers


def _rank(rank: int, ranks: int, port: int, pipe: Connection) -> None:
    """One process: connect, then work until the other end of the pipe is closed."""
    os.environ.update(rank_variables(rank, ranks, port), OMP_NUM_THREADS="1")
    os.dup2(2, 1)  # what libraries print is no part of a benchmark's table
    import torch

    from ddlbench.ranks.launch import connect
    from ddlbench.ranks.launchers import detect

    torch.set_num_threads(1)
    connect(detect(), torch.device("cpu"), TIMEOUT_S)
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, work(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
