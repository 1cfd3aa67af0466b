"""The clock around a loader. The command line of every script that reads images: FOLDER BATCH SIZE WORKERS."""

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch


def timed(open_epochs: Callable[[str, int, int, int], Iterable[Iterable[Any]]]) -> None:
    """Read epoch after epoch, without end, and print at what time each batch was there."""
    torch.set_num_threads(1)
    for batches in open_epochs(sys.argv[1], *map(int, sys.argv[2:5])):
        for _ in batches:
            print(time.monotonic(), flush=True)
