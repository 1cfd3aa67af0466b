"""What ddlbench's loop itself costs a step: the loop with a framework that does nothing, beside a bare `for`.

    python -m benchmarks.loop_cost [--steps 5000] [--epochs 7]

The clock, learning rates, the heartbeat, the votes of the boundary (of one process) and the progress lines are those of
a run; reading data, recording and validation are no part of a step. With `profile=true` nothing of this changes: the
profiled window comes after the measured epochs. Prints microseconds; the median epoch counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from ddlbench.data.feed import Feed
from ddlbench.job import Batch, Job, Place, Trainer
from ddlbench.loop import Run, train
from ddlbench.measure.rows import EpochRow
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.recipe.rates import Rates

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
    """Keeps the rows that a recorder would write."""

    rows: list[EpochRow] = field(default_factory=list[EpochRow])

    def begin(self, run: Run, spans: Mapping[str, float], hosts: Sequence[str]) -> None: ...

    def epoch(self, run: Run, row: EpochRow) -> None:
        self.rows.append(row)


@dataclass
class Beat:
    """What a run's supervision hears at every step."""

    heard: float = 0.0

    def progressed(self) -> None:
        self.heard = time.perf_counter()


def batches(steps: int) -> Iterator[Batch]:
    return repeat(Batch(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool)), steps)


def loop_s(steps: int, epochs: int) -> list[float]:
    """Seconds of each epoch but the first, as the loop's own clock has them."""
    feed = SimpleNamespace(train=lambda epoch: batches(steps), steps_per_epoch=steps)
    job = SimpleNamespace(device=CPU, rank=0, global_batch=1)
    rows = Rows()
    run = Run(
        cast(Job, job), Place(0, 1), cast(Feed, feed), epochs + 1, 0, cast(Any, rows), Progress(True),
        Boundary(CPU, Beat().progressed), validate=False,
    )  # fmt: skip
    train(run, cast(Trainer, Nothing()), Rates(lambda step: 0.1))
    return [row.epoch_time_s for row in rows.rows[1:]]


def bare_s(steps: int) -> float:
    """Seconds of the same steps without the loop."""
    trainer, began = Nothing(), time.perf_counter()
    for batch in batches(steps):
        trainer.step(batch)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    loop = [seconds / given.steps * 1e6 for seconds in loop_s(given.steps, given.epochs)]
    bare = [bare_s(given.steps) / given.steps * 1e6 for _ in range(given.epochs)]
    print(f"bare loop  {statistics.median(bare):6.2f} us a step (fastest {min(bare):.2f}, slowest {max(bare):.2f})")
    print(f"ddlbench   {statistics.median(loop):6.2f} us a step (fastest {min(loop):.2f}, slowest {max(loop):.2f})")


if __name__ == "__main__":
    main()
