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
from importlib import import_module

IMAGES = ("native/torchvision", "dali/by hand", "dali/native")
PARTS = {**dict.fromkeys(IMAGES, "images"), "tokens": "windows", "pack": "packing", "index": "indexing"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", choices=PARTS, help="one part")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that are started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`: a stopped program would stay
    for name, module in PARTS.items():
        if arguments.only in (None, name):
            # Not before: the processes that `pack` starts import whatever this file imports at its head.
            import_module(f"benchmarks.{module}").compare(name, arguments.pairs)


if __name__ == "__main__":
    main()
