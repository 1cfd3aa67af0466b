"""Two readers of the same images, turn by turn, as benchmarks/overhead.py compares programs: one runs, one is stopped.

Both print when each batch was there, by one clock. What counts in a turn lies between its first and its last batch.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.turns import Pairs, Program, ratio_text, show, take_turns
from ddlbench.data.samples import SampleImages

BATCH, SIZE, WORKERS = 32, 224, 2
TURN_S = 2.0  # a batch takes a tenth of a second
WARM = 12  # batches before the first turn


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


def read_by_turns(commands: list[list[str]], folder: Path, pairs: int, turn_s: float) -> Pairs:
    """Seconds a batch of the first program and of the second, pair by pair."""
    readers: list[Program] = []
    try:
        for number, command in enumerate(commands):
            readers.append(reader := Program(folder / str(number), command))
            reader.wait_until_warm(WARM)
        first, second = readers
        return take_turns((first, second), pairs, turn_s)
    finally:
        for reader in readers:
            reader.kill()


def command(side: tuple[str, ...], images: Path, *settings: int) -> list[str]:
    module, *first = side
    return [sys.executable, "-m", module, *first, str(images), *map(str, settings)]


def compare(name: str, pairs: int) -> None:
    images, what = SampleImages("sample_images"), COMPARISONS[name]
    images.prepare()
    commands = [command(side, images.layout().root, BATCH, SIZE, WORKERS) for side in (what.own, what.other)]
    with tempfile.TemporaryDirectory() as folder:
        result = read_by_turns(commands, Path(folder), pairs, TURN_S)
    speeds = " and ".join(f"{BATCH / median(seconds):.0f}" for seconds in zip(*result.complete, strict=True))
    show(name, f"ratio {ratio_text(result.ratios())}, {result.remark()}, {speeds} images/s; aim: {what.aim}")
