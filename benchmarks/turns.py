"""Two programs that run by turns: one runs while the other is stopped (SIGSTOP), with all its processes. And what all
comparisons share: a ratio as it is printed, and the memory of a program with all its processes.

Both are started once and stay alive. The two turns of a pair follow each other at once, and every second pair has them
in the other order, so a slow spell of the machine falls on both programs. A program prints time.monotonic() at the end
of each step, by the clock that also times the turns: so a step is known to belong to the turn in which it ran. A pair
in which one of the programs had no complete step is lost, and counted.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from ddlbench.results.tables.stats import confidence, median_interval

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
POLL_S = 0.02  # between two looks at the memory
WARM = 6  # steps before the first turn
STEP = re.compile(r"^(?:.*>:)?(\d+\.\d+)$", re.MULTILINE)  # horovodrun puts "[rank]<stdout>:" before a line
Turn = tuple[float, float]  # its begin and its end
Command = Sequence[str]


class Program:
    """A program with all its processes. It writes under `folder`."""

    def __init__(self, folder: Path, command: Command, environment: dict[str, str] | None = None) -> None:
        self.folder, self.command = folder, command
        folder.mkdir()
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, start_new_session=True, cwd=ROOT, env=environment
            )

    def times(self) -> list[float]:
        """The end of every step so far."""
        complete = (self.folder / "out").read_text().rpartition("\n")[0]
        return [float(time) for time in STEP.findall(complete)]

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Raises SystemExit if the program ends before; stopped from there on."""
        until = time.monotonic() + LIMIT_S
        while not ready():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(self.command)} did not begin its steps:\n{self.errors()}")
            time.sleep(0.1)
        self.signal(signal.SIGSTOP)

    def wait_until_warm(self, steps: int = WARM) -> None:
        self.wait_until(lambda: len(self.times()) >= steps)

    def step_s(self) -> float:
        """The shortest of its steps so far."""
        times = self.times()
        return min(after - before for before, after in pairwise(times))

    def turn(self, seconds: float) -> Turn:
        began = time.monotonic()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        if self.process.poll() is not None:
            raise SystemExit(f"{' '.join(self.command)} ended before its last turn:\n{self.errors()}")
        self.signal(signal.SIGSTOP)
        return began, time.monotonic()

    def signal(self, number: int) -> None:
        family = psutil.Process(self.process.pid)
        for process in [*family.children(recursive=True), family]:
            process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def errors(self) -> str:
        return (self.folder / "err").read_text()


@dataclass(frozen=True)
class Pairs:
    """complete: seconds a step of the first program and of the second, pair by pair
    lost: numbers, from 1, of the pairs in which one of them had no complete step"""

    complete: list[tuple[float, float]]
    lost: list[int]

    def ratios(self) -> list[float]:
        """Steps a second of the first program over those of the second."""
        return [second / first for first, second in self.complete]

    def swapped(self) -> Pairs:
        """The first program's as the second's."""
        return Pairs([(second, first) for first, second in self.complete], self.lost)

    def remark(self) -> str:
        numbers = f" ({', '.join(map(str, self.lost))})" if self.lost else ""
        return f"{len(self.lost)} of {len(self.complete) + len(self.lost)} pairs lost{numbers}"


def take_turns(programs: tuple[Program, Program], pairs: int, seconds: float) -> Pairs:
    """Both programs are stopped before and after."""
    first, second = programs
    turns: list[tuple[Turn, Turn]] = []
    for number in range(pairs):
        if number % 2:
            later = second.turn(seconds)
            turns.append((first.turn(seconds), later))
        else:
            turns.append((first.turn(seconds), second.turn(seconds)))
    return pair_by_time(first.times(), second.times(), turns)


def pair_by_time(first: list[float], second: list[float], turns: Sequence[tuple[Turn, Turn]]) -> Pairs:
    """first, second: the ends of the steps of two programs; turns: theirs, pair by pair."""
    seconds = [(seconds_a_step(first, turn), seconds_a_step(second, other)) for turn, other in turns]
    complete = [(one, two) for one, two in seconds if one is not None and two is not None]
    return Pairs(complete, [number for number, pair in enumerate(seconds, start=1) if None in pair])


def seconds_a_step(ends: Sequence[float], turn: Turn) -> float | None:
    """Mean from the first end of a step within the turn to the last one: so the step that a stop interrupted does not
    count. None without a complete step."""
    inside = [at for at in ends if turn[0] <= at <= turn[1]]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else None


def ratio_text(ratios: Sequence[float]) -> str:
    """Median with its distribution-free interval; the single ratios go to standard error."""
    if not ratios:
        return "unknown: no pair of turns is complete"
    print(" ".join(f"{ratio:.3f}" for ratio in ratios), file=sys.stderr)
    interval = median_interval(ratios)
    shown = f"{interval.low:.3f} .. {interval.high:.3f}, " if interval else ""
    return f"{median(ratios):.3f} ({shown}{confidence(len(ratios), interval)})"


def show(name: str, text: str) -> None:
    print(f"{name:28s} {text}", flush=True)


def peak_resident(*arguments: str) -> tuple[float, str]:
    """Run a Python module to its end: the most MB it had resident, and what it printed.

    Each process of it counts with the most that it ever had, as Linux keeps it (VmHWM); the sum is an upper bound.
    """
    most: dict[int, float] = {}
    command = [sys.executable, "-m", *arguments]
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, cwd=ROOT, stdout=out) as program:
        while program.poll() is None:
            with suppress(psutil.NoSuchProcess):
                for process in (parent := psutil.Process(program.pid), *parent.children(recursive=True)):
                    most[process.pid] = high_water_mb(process.pid) or most.get(process.pid, 0.0)
            time.sleep(POLL_S)
        if program.returncode:
            raise SystemExit(f"{' '.join(command)} exited with {program.returncode}")
        out.seek(0)
        return sum(most.values()), out.read()


def high_water_mb(pid: int) -> float | None:
    """None for a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), None)
