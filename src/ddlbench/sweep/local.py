"""Runs cells on this machine, one after another, each in separate processes with a time limit; no process is left
behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch

from ddlbench.config.compose import configuration
from ddlbench.cores import allowed_cores
from ddlbench.errors import RunError
from ddlbench.ranks.launchers import PLACE_VARIABLES, free_port, rank_variables
from ddlbench.record.files import end_for_rank_0, keeper_alive, now
from ddlbench.sweep.end_without_record import record_end
from ddlbench.sweep.lock import FOLDER, Claim, claim, queue
from ddlbench.sweep.plan import Cell
from ddlbench.sweep.state import RUNNING, State, due
from ddlbench.texts import MIB

RANKS_PER_CORE = 2  # at most, where there is no GPU
POLL_S = 0.05
GRACE_S = 30.0  # to record the end: after a signal, or after another rank has failed
LOST = "this process was stopped for minutes and another sweep has taken its cell over: start it again to continue"
# A file to lock (flock(2)): one for all processes of this machine, wherever their temporary folders are. The lock ends
# with its process.
TURN = Path(f"/dev/shm/ddlbench-sweep-{os.getuid()}")

Say = Callable[[str], None]


def run_cells(cells: Sequence[Cell], state: State, retry: str | None, say: Say) -> None:
    """Run all due cells in this order. KeyboardInterrupt after the ranks of an interrupted cell have ended."""
    most = most_ranks()
    todo = [cell for cell in cells if cell.gpus <= most and not cell.invalid and due(state.status(cell), retry)]
    seen = {cell.key: len(state.of(cell)) for cell in todo}
    for number, cell in enumerate(todo, 1):
        with _turn(say), contextlib.ExitStack() as at_end:
            held = claim(state.results, cell.key, queued=lambda name: queue()(name))
            if held is None:
                continue
            at_end.callback(held.release)
            deadline = time.monotonic() + GRACE_S  # the ranks of a sweep that was killed end by themselves
            while state.refresh().runs_here(cell) and time.monotonic() < deadline:
                time.sleep(1)
            # What another program has run since this sweep began is not tried again.
            again = retry if len(state.of(cell)) == seen[cell.key] else None
            if not due(state.status(cell), again):
                continue
            if state.runs_here(cell):
                say(f"{cell.name} repeat {cell.repeat}: left out, because another program runs it on this machine")
                continue
            started, began = time.monotonic(), now()
            codes, output = run_cell(cell, state.results, held)
            status = _ended(cell, state, codes, began, output)
        say(f"[{number}/{len(todo)}] {cell.name} repeat {cell.repeat}: {status} ({time.monotonic() - started:.1f} s)")


def most_ranks() -> int:
    """The most ranks that a cell may have here: one per GPU; without GPUs two per core."""
    return torch.cuda.device_count() or RANKS_PER_CORE * len(allowed_cores())


def too_large(cells: Sequence[Cell]) -> list[str]:
    """A line on the cells that have more, if there are any."""
    most = most_ranks()
    if not (ranks := [cell.gpus for cell in cells if cell.gpus > most and not cell.invalid]):
        return []
    return [
        f"{len(ranks)} cells need up to {max(ranks)} ranks, this machine may start {most} (one for each GPU, without "
        "GPUs two for each core): use --slurm, or leave them out with gpus=[...]"
    ]


def run_cell(cell: Cell, results: Path, held: Claim | None = None) -> tuple[list[int], str]:
    """Start a cell's ranks and wait for them; their exit codes, and the last MiB of what they printed. No rank is left,
    even after an error."""
    path = results / FOLDER / "logs" / f"{cell.key}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "ddlbench", *cell.command(results)]
    # torchrun's variables, without those of a launcher around this program; one rank is one device.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PLACE_VARIABLES)}
    kept["OMP_NUM_THREADS"] = "1"
    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    with path.open("a+b") as log:
        logged = log.tell()  # by earlier runs
        try:
            for rank in range(cell.gpus):
                place = rank_variables(rank, cell.gpus, port) if cell.gpus > 1 else {}
                ranks.append(_start(words, kept | place, log.fileno()))
            _wait(ranks, time.monotonic() + cell.limit_s, held)
        finally:
            end(ranks)
        log.seek(max(logged, log.seek(0, os.SEEK_END) - MIB))
        return [rank.wait() for rank in ranks], log.read(MIB).decode(errors="replace")


def end(ranks: Sequence[subprocess.Popen[bytes]], first: signal.Signals = signal.SIGTERM) -> None:
    """Let the ranks record their end, then kill them and the processes that they started."""
    for number in (first, signal.SIGKILL):
        for rank in ranks:
            rank.send_signal(number)  # nothing where the rank has ended
        deadline = time.monotonic() + GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)


@contextlib.contextmanager
def _turn(say: Say) -> Generator[None]:
    """Hold this machine for one cell: sweeps of this user run cells in turn, so that none disturbs another."""
    with TURN.open("a") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting: another sweep runs a cell on this machine")
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def _ended(cell: Cell, state: State, codes: list[int], began: str, output: str) -> str:
    """The status of a cell whose processes have ended. A record that still says `running` is closed; if the run left no
    record, one is written. began: in the format of a record's times"""
    reason = f"all ranks exited without recording an end: exit codes {', '.join(map(str, codes))}"
    attempts = state.refresh().of(cell)
    for attempt in attempts:
        if attempt.status == RUNNING:
            with contextlib.suppress(Exception):  # no heartbeat, or none that can be read
                if keeper_alive(attempt.folder) is not False:  # a process that this sweep has not started
                    continue
            end_for_rank_0(attempt.folder, "error", reason)
    if any(codes) and not any(attempt.start >= began for attempt in attempts):
        record_end(configuration(*cell.command(state.results)), dict(enumerate(codes)), began, output, [cell.gpus])
    return state.refresh().status(cell)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, held: Claim | None) -> None:
    """Wait until all ranks have ended, the time limit is reached, or GRACE_S have passed since a rank failed."""
    failed: float | None = None
    checked = time.monotonic()
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        if failed is None and any(rank.returncode for rank in ranks):
            failed = now
        if failed is not None and now > failed + GRACE_S:
            return
        if now > deadline:
            end(ranks, signal.SIGUSR1)
            return
        if now > checked + 5:
            checked = now
            if held is not None and held.lost():
                raise RunError(LOST)
        time.sleep(POLL_S)


def _start(words: Sequence[str], variables: dict[str, str], log: int) -> subprocess.Popen[bytes]:
    """Start a rank in a new session, so that Ctrl-C reaches only the sweep, which then ends all ranks equally."""
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=variables,
        start_new_session=True,
        preexec_fn=lambda: _LIBC.prctl(1, signal.SIGTERM),  # when the sweep ends (prctl(2), PR_SET_PDEATHSIG)
    )


_LIBC = ctypes.CDLL(None)  # loaded before the fork
