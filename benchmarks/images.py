"""Two readers of the same images, turn by turn, as benchmarks/overhead.py compares programs: one runs, one is stopped.

Both print when each batch was there, by one clock. What counts in a turn lies between its first and its last batch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.overhead import Side
from benchmarks.pairs import tell, told
from ddlbench.data.images.sample import SampleImages

BATCH, SIZE, WORKERS = 32, 224, 2
TURN_S = 2.0  # a batch takes a tenth of a second
WARM = 12  # batches before the first turn
Turn = tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """own, other: a module and its first arguments; aim: of own's images a second over other's"""

    own: tuple[str, ...]
    other: tuple[str, ...]
    aim: str


NATIVE, DALI = ("benchmarks.reading", "native"), ("benchmarks.reading", "dali")
COMPARISONS = {
    "native/torchvision": Comparison(NATIVE, ("benchmarks.bare.imagefolder",), "at least 1"),
    "dali/by hand": Comparison(DALI, ("benchmarks.bare.dali",), "at least 0.98"),
    "dali/native": Comparison(DALI, NATIVE, "none"),
}


class Reader(Side):
    """A program that prints a time a batch."""

    def times(self) -> list[float]:
        lines = (self.folder / "out").read_text().split("\n")
        return [float(line) for line in lines[:-1]]  # the last may still be in the making

    def is_warm(self) -> bool | None:
        return len(self.times()) >= WARM or None

    def timed_turn(self, seconds: float) -> Turn:
        began = time.monotonic()
        self.turn(seconds)
        return began, time.monotonic()


def rate(times: list[float], turn: Turn, batch: int) -> float | None:
    """Images a second from the first to the last batch of a turn; None where a slow spell left less than two."""
    inside = [at for at in times if turn[0] <= at <= turn[1]]
    return batch * (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else None


def rates(commands: list[list[str]], folder: Path, pairs: int, turn_s: float, batch: int) -> list[tuple[float, ...]]:
    """(images a second of the first program, of the second), pair by pair."""
    readers: list[Reader] = []
    try:
        for number, command in enumerate(commands):
            readers.append(reader := Reader(folder / str(number), command))
            reader.wait_for(reader.is_warm)
        turns = [[reader.timed_turn(turn_s) for reader in readers] for _ in range(pairs)]
        every = [reader.times() for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    found = [[rate(times, turn, batch) for times, turn in zip(every, pair, strict=True)] for pair in turns]
    return [tuple(speed) for speed in found if None not in speed]


def command(side: tuple[str, ...], images: Path, *settings: int) -> list[str]:
    module, *first = side
    return [sys.executable, "-m", module, *first, str(images), *map(str, settings)]


def compare(name: str, pairs: int) -> None:
    images, what = SampleImages("sample_images"), COMPARISONS[name]
    images.prepare()
    commands = [command(side, images.layout().root, BATCH, SIZE, WORKERS) for side in (what.own, what.other)]
    with tempfile.TemporaryDirectory() as folder:
        found = rates(commands, Path(folder), pairs, TURN_S, BATCH)
    own, other = (median(side) for side in zip(*found, strict=True))
    speeds = f"{own:.0f} and {other:.0f} images/s"
    tell(name, f"ratio {told([a / b for a, b in found])}, {speeds}; aim: {what.aim}")
