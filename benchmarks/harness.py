"""ddlbench as it is, but rank 0 prints the time at the end of each step, as the scripts of benchmarks/bare/ do.

The command line is that of `python -m ddlbench`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from ddlbench import __main__ as program  # first: its import begins the time of the start-up

import ddlbench.loop  # isort: skip
from ddlbench.measure.clock import EpochClock  # isort: skip

Item = TypeVar("Item")
first = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")) == "0"


class PrintingClock(EpochClock):
    def steps(self, batches: Iterable[Item]) -> Iterator[Item]:
        for batch in super().steps(batches):
            yield batch
            if first:
                print(time.monotonic(), flush=True)


if __name__ == "__main__":
    ddlbench.loop.EpochClock = PrintingClock
    sys.exit(program.main())
