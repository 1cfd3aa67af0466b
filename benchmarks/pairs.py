"""What comparisons of loaders share: a ratio as it is printed, and the memory of a program with all its processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from ddlbench.results.tables.stats import confidence, median_interval

ROOT = Path(__file__).parents[1]
POLL_S = 0.02


def ratio_text(ratios: Sequence[float]) -> str:
    """Median with its distribution-free interval; the single ratios go to standard error."""
    if not ratios:
        return "unknown: no pair of turns is complete"
    print(" ".join(f"{ratio:.3f}" for ratio in ratios), file=sys.stderr)
    interval = median_interval(ratios)
    shown = f"{interval.low:.3f} .. {interval.high:.3f}, " if interval else ""
    return f"{median(ratios):.3f} ({shown}{confidence(len(ratios), interval)})"


def show(name: str, text: str) -> None:
    print(f"{name:28s} {text}", flush=True)


def peak_resident(*arguments: str) -> tuple[float, str]:
    """Run a Python module to its end: the most MB it had resident, and what it printed.

    Each process of it counts with the most that it ever had, as Linux keeps it (VmHWM); the sum is an upper bound.
    """
    most: dict[int, float] = {}
    command = [sys.executable, "-m", *arguments]
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, cwd=ROOT, stdout=out) as program:
        while program.poll() is None:
            with suppress(psutil.NoSuchProcess):
                for process in (parent := psutil.Process(program.pid), *parent.children(recursive=True)):
                    most[process.pid] = high_water_mb(process.pid) or most.get(process.pid, 0.0)
            time.sleep(POLL_S)
        if program.returncode:
            raise SystemExit(f"{' '.join(command)} exited with {program.returncode}")
        out.seek(0)
        return sum(most.values()), out.read()


def high_water_mb(pid: int) -> float | None:
    """None for a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), None)
