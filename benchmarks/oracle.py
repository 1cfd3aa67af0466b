"""How far the oracle is off on this machine: measured steps of 2 and 4 processes beside predictions from one process.

python -m benchmarks.oracle [--repeats 3] [--only ddp] [--model gpt2_small] [--keep FOLDER] [--minutes 30]

Calibration and test are different runs, in one random order in each repeat (benchmarks/calibration.py has the first,
this file the second). One row a framework, model and number of processes, misses included; accuracy is
1 - |predicted - measured| / measured (Kahira et al. 2021). The aim is 90 % on average.

Processes are started once for each number of them. Every measurement is written as it is made: with --keep a run that
was interrupted goes on where it was, and FOLDER/table.md has the table of what there was after the last repeat.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, median

from benchmarks import calibration, steps
from benchmarks.calibration import COUNTS, MODELS, Calibration, Measurement, words
from benchmarks.worlds import WorkFailed, World
from ddlbench.config.compose import configuration
from ddlbench.oracle.predictor import Prediction, predict
from ddlbench.results.rows import group_by
from ddlbench.texts import markdown_table

WINDOW_S = 0.6  # several steps of most cases
HEAD = ("model", "framework", "processes", "measured", "repeats", "spread", "predicted", "compute", "comm", "bubble",
        "error", "accuracy")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One framework, model and number of processes: what was measured in each repeat, and what was predicted."""

    case: Measurement
    seconds: tuple[float, ...]
    prediction: Prediction | None

    @property
    def measured(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    @property
    def error(self) -> float | None:
        """Signed: negative where it was predicted too fast."""
        if self.measured is None or self.prediction is None or self.prediction.step_s is None:
            return None
        return (self.prediction.step_s - self.measured) / self.measured


@dataclass
class Kept:
    """The measurements of a folder, a line each: what it is, and its seconds."""

    path: Path

    def read(self) -> dict[Measurement, list[list[float]]]:
        """The repeats of each measurement."""
        repeats: dict[Measurement, list[list[float]]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            plain = json.loads(line)
            repeats.setdefault(Measurement(*plain["of"]), []).append(plain["seconds"])
        return repeats

    def add(self, of: Measurement, seconds: list[float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"of": [of.kind, of.model, of.framework, of.ranks], "seconds": seconds}) + "\n")


def measure(of: Measurement, worlds: dict[int, World]) -> list[float]:
    """One repeat. WorkFailed where a rank fails."""
    world = worlds[of.ranks]
    if of.kind != "step":
        return calibration.measure(of, world, WINDOW_S)
    return world.run(steps.step_seconds, configuration(*words(of)), WINDOW_S)[0]


def rows(cases: Sequence[Measurement], measured: dict[Measurement, list[list[float]]]) -> list[Row]:
    """measured: the repeats of each measurement"""
    inputs = Calibration(measured)

    def predicted(case: Measurement) -> Prediction | None:
        return predict(configuration(*words(case)), case.ranks, inputs.of(case)) if inputs.covers(case) else None

    return [Row(case, tuple(map(median, measured.get(case, []))), predicted(case)) for case in cases]


def table(rows: Sequence[Row]) -> str:
    lines = markdown_table(HEAD, map(cells, rows))
    errors = [row.error for row in rows if row.error is not None]
    if not errors:
        return f"{lines}\nno row has both a measurement and a prediction"
    return "\n".join([
        lines, f"mean accuracy of {len(errors)} of {len(rows)} rows: {accuracy(rows)}",
        *(", ".join(f"{name} {accuracy(part)}" for name, part in group_by(rows, by).items()) for by in PARTS),
    ])  # fmt: skip


PARTS: tuple[Callable[[Row], str], ...] = (
    lambda row: row.case.model,
    lambda row: row.case.framework,
    lambda row: f"{row.case.ranks} processes",
)


def accuracy(rows: Sequence[Row]) -> str:
    """Mean of 1 - |error| of the rows that have one."""
    accuracies = [1 - abs(row.error) for row in rows if row.error is not None]
    return f"{fmean(accuracies):.1%}" if accuracies else "unknown"


def cells(row: Row) -> list[str]:
    """spread: of the repeats, (slowest - fastest) / median."""
    case, took, guess = row.case, row.measured, row.prediction
    names = [case.model, case.framework, str(case.ranks)]
    if took is None:
        measured = ["not measured", "0", ""]
    else:
        spread = (max(row.seconds) - min(row.seconds)) / took
        measured = [milliseconds(took), str(len(row.seconds)), f"{spread:.0%}"]
    if guess is None or guess.step_s is None:
        return [*names, *measured, guess.reason if guess else "not calibrated", *[""] * 5]
    parts = [guess.step_s, guess.compute_s, guess.comm_exposed_s, guess.bubble_s]
    score = ["", ""] if row.error is None else [f"{row.error:+.1%}", f"{1 - abs(row.error):.1%}"]
    return [*names, *measured, *(milliseconds(part or 0.0) for part in parts), *score]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=calibration.FRAMEWORKS, default=list(calibration.FRAMEWORKS))
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--keep", type=Path, help="folder of the measurements; those that are there already count")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no measurement after so many minutes")
    given = parser.parse_args()
    folder: Path = given.keep or Path("build") / f"bench-oracle-{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"measurements: {folder} (--keep goes on there)", file=sys.stderr)
    cases = [
        Measurement("step", model, name, ranks) for model in given.model for name in given.only for ranks in COUNTS
    ]
    measure_all([*calibration.needed(given.model, given.only), *cases], cases, given.repeats, folder, given.minutes)
    print(table(rows(cases, Kept(folder / "seconds.jsonl").read())))


def measure_all(
    wanted: Sequence[Measurement], cases: Sequence[Measurement], repeats: int, folder: Path, minutes: float
) -> None:
    """What is not there yet; the table so far after each repeat."""
    kept = Kept(folder / "seconds.jsonl")
    worlds = {ranks: World(ranks) for ranks in (1, *COUNTS)}
    until = time.monotonic() + 60 * minutes
    order = random.Random(0)
    try:
        for repeat in range(repeats):
            there = kept.read()
            todo = [of for of in wanted for _ in range(missing(of, len(there.get(of, [])), repeat))]
            for number, of in enumerate(order.sample(todo, len(todo)), start=1):
                if time.monotonic() > until:
                    print(f"stopped after {minutes:g} minutes", file=sys.stderr)
                    return
                took = keep(of, kept, worlds)
                print(f"repeat {repeat + 1}: {number} of {len(todo)}: {of} {took}", file=sys.stderr, flush=True)
            (folder / "table.md").write_text(table(rows(cases, kept.read())) + "\n")
    finally:
        for world in worlds.values():
            world.close()


def missing(of: Measurement, there: int, repeat: int) -> int:
    """How often it is to be measured in this repeat. there: how often it was"""
    return min(of.times, (repeat + 1) * of.times - there)


def keep(of: Measurement, kept: Kept, worlds: dict[int, World]) -> str:
    """Measure and write. A failure leaves its repeat out, and is printed."""
    try:
        seconds = measure(of, worlds)
    except WorkFailed as failure:
        return f"failed: {str(failure).strip().splitlines()[-1]}"
    kept.add(of, seconds)
    return milliseconds(median(seconds))


if __name__ == "__main__":
    main()
