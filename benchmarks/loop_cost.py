"""What ddlbench's loop itself costs a step: the loop with a framework that does nothing, beside a bare `for`.

    python -m benchmarks.loop_cost [--steps 5000] [--epochs 7]

The clock, its meter, learning rates, the heartbeat, the votes of the boundary (of one process) and the progress lines
are those of a run; reading data, recording and validation are no part of a step. With `profile=true` nothing of this
changes: the profiled window comes after the measured epochs. Prints microseconds of the clock and of the processor's
time: on a machine that others use too, the second says what the loop itself costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from ddlbench.data.feed import Feed
from ddlbench.job import Batch, Job, Place, Trainer
from ddlbench.loop import Run, train
from ddlbench.measure.devices.meter import Meter
from ddlbench.measure.rows import EpochRow
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.recipe.schedules import Rates

CPU = torch.device("cpu")


@dataclass
class Nothing:
    """A trainer that trains nothing: each step returns the same loss."""

    optimizer: Any = field(default_factory=lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=1.0))
    loss: Tensor = field(default_factory=lambda: torch.ones(()))
    updates: int = 0

    def step(self, batch: Batch | None) -> Tensor:
        self.updates += 1
        return self.loss

    def flush(self) -> None: ...


@dataclass
class Rows:
    """Keeps the rows that a recorder would write, and the processor's time at each."""

    rows: list[EpochRow] = field(default_factory=list[EpochRow])
    cpu_s: list[float] = field(default_factory=list[float])

    def begin(self, run: Run, spans: Mapping[str, float], hosts: Sequence[str]) -> None: ...

    def epoch(self, run: Run, row: EpochRow) -> None:
        self.rows.append(row)
        self.cpu_s.append(time.process_time())


@dataclass
class Beat:
    """The part of a run's supervision that every step calls."""

    heard: float = 0.0

    def progressed(self) -> None:
        self.heard = time.perf_counter()


def batches(steps: int) -> Iterator[Batch]:
    return repeat(Batch(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool)), steps)


def loop_s(steps: int, epochs: int) -> tuple[list[float], list[float]]:
    """Seconds of each epoch but the first, as the loop's own clock has them, and of the processor."""
    feed = SimpleNamespace(train=lambda epoch: batches(steps), steps_per_epoch=steps)
    job = SimpleNamespace(device=CPU, rank=0, global_batch=1)
    rows = Rows()
    run = Run(
        cast(Job, job), Place(0, 1), cast(Feed, feed), epochs + 1, 0, cast(Any, rows), Progress(True),
        Boundary(CPU, Beat().progressed), validate=False, meter=Meter(CPU, leader=True),
    )  # fmt: skip
    train(run, cast(Trainer, Nothing()), Rates(lambda step: 0.1))
    return [row.epoch_time_s for row in rows.rows[1:]], [after - before for before, after in pairwise(rows.cpu_s)]


def bare_s(steps: int) -> tuple[float, float]:
    """Seconds and CPU seconds of as many steps without the loop."""
    trainer, began, used = Nothing(), time.perf_counter(), time.process_time()
    for batch in batches(steps):
        trainer.step(batch)
    return time.perf_counter() - began, time.process_time() - used


def line(name: str, steps: int, clock_s: Sequence[float], cpu_s: Sequence[float]) -> str:
    """Medians over epochs, and the range of the clock's."""
    clock, cpu = ([seconds / steps * 1e6 for seconds in epochs] for epochs in (clock_s, cpu_s))
    spread = f"clock {median(clock):6.2f} ({min(clock):.2f} to {max(clock):.2f})"
    return f"{name:9} us a step: processor {median(cpu):6.2f}, {spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bare_clock, bare_cpu = zip(*(bare_s(given.steps) for _ in range(given.epochs)), strict=True)
    print(line("bare loop", given.steps, bare_clock, bare_cpu))
    print(line("ddlbench", given.steps, *loop_s(given.steps, given.epochs)))


if __name__ == "__main__":
    main()
