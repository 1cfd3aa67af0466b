"""python -m tests.breaches [--quick] [NAME...]: every breach must be noticed; exit code 1 where one is not.

`make test-breaches` runs all. A NAME may be a part of a breach's name.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

from tests.breaches.breach import load
from tests.breaches.runner import run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.breaches", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only breaches with this in their name")
    parser.add_argument("--quick", action="store_true", help="only those that `make test` runs")
    parser.add_argument("--list", type=Path, action="append", metavar="FILE", help="breaches of this TOML file instead")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    asked = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    breaches = [
        breach
        for breach in (load(asked.list) if asked.list else load())
        if (breach.quick or not asked.quick) and (not asked.names or any(name in breach.name for name in asked.names))
    ]
    missed = 0
    with TemporaryDirectory(prefix="breaches-") as folder:
        for result in run_all(breaches, Path(folder), asked.jobs):
            missed += result.problem is not None
            said = "noticed" if result.breach.file else "pass"
            print(f"{result.breach.name}: {result.problem or said} ({result.seconds:.1f} s)", flush=True)
    print(f"{len(breaches)} breaches, {missed} problems")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
