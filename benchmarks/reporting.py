"""What a report of a large campaign costs: `python -m ddlbench.report` on made-up runs, phase by phase.

python -m benchmarks.reporting [--runs 10000] [--epochs 10] [--folder DIR]

Printed for each phase: seconds by the clock, CPU seconds, and the most memory that was resident so far; then what the
report holds. The aim for 10,000 runs of 10 epochs is 60 s and 2 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.campaign import write_campaign

PHASES = ("read_all", "make_tables", "make_figures", "write_documents", "render")


def now() -> tuple[float, float]:
    """Seconds by the clock and of the CPU."""
    return time.perf_counter(), time.process_time()


def tell(name: str, began: tuple[float, float]) -> None:
    wall, cpu = (after - before for before, after in zip(began, now(), strict=True))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{name:16s} {wall:7.1f} s {cpu:7.1f} s CPU, at most {resident / 2**20:.2f} GiB")


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*arguments: Any, **more: Any) -> Any:
        began = now()
        try:
            return function(*arguments, **more)
        finally:
            tell(name, began)

    return measured


def report(folder: Path) -> None:
    began = now()
    from ddlbench.report import __main__ as program

    tell("imports", began)
    for name in PHASES:
        setattr(program, name, timed(name, getattr(program, name)))
    program.Tables.write = timed("CSV files", program.Tables.write)
    with contextlib.redirect_stderr(io.StringIO()):
        assert program.main([str(folder)]) == 0
    tell("all", began)
    show_sizes(folder / "report")


def show_sizes(folder: Path) -> None:
    figures = list((folder / "figures").iterdir())
    print(f"page: {(folder / 'report.html').stat().st_size / 1e6:.1f} MB, {len(figures)} files of figures")
    for path in sorted((folder / "tables").glob("*.csv")):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--folder", type=Path, help="where the runs are made, or are already (default: a temporary one)"
    )
    parser.add_argument("--template", type=Path, help="folder of an attempt (default: one of results/example)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder: Path = given.folder or Path(made) / "results"
        if not folder.exists():
            write_campaign(folder, given.runs, given.epochs, given.template)
        report(folder)


if __name__ == "__main__":
    main()
