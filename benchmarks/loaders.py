"""How fast data is read, packed and indexed, beside what a user would do without ddlbench.

python -m benchmarks.loaders [--pairs 15] [--only index]

Both sides of a comparison work by turns in one run, a second or two apart, so that a slow spell of the machine falls on
both. Printed: the median ratio of speeds, ddlbench's over the other's, with its distribution-free 95 % interval. All of
it takes about seven minutes and reads the sample images and the sample text, which are made where they are missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

from benchmarks import images, indexing, packing, windows

TURN_S = 2.0  # of programs that read images; a batch takes a tenth of a second

PARTS: dict[str, Callable[[int], None]] = {
    **{name: partial(images.compare, name, TURN_S) for name in images.COMPARISONS},
    "tokens": windows.compare,
    "pack": packing.compare,
    "index": lambda _: indexing.compare(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", choices=PARTS, help="one part")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that are started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`: a stopped program would stay
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(arguments.pairs)


if __name__ == "__main__":
    main()
