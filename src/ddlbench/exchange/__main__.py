"""python -m ddlbench.exchange: import published measurements, export own records as logs of MLPerf Training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ddlbench.errors import RunError, UserError
from ddlbench.exchange.mllog import export
from ddlbench.exchange.store import add
from ddlbench.results.reading.csv_rows import read_points, without_base
from ddlbench.results.reading.mlperf import read_results
from ddlbench.results.reading.published import Facts
from ddlbench.texts import say

NOTHING = 1  # exit code


def import_published(given: argparse.Namespace) -> int:
    """Add measurements that others published to RESULTS/published.jsonl: rows of the same tables and figures as own
    ones. Exit code 1 if no measurement could be used."""
    facts, left_out = list[Facts](), list[str]()
    for place in given.places:
        if not place.is_dir():
            points, unusable = read_points(place)
            say(*(f"{place}: {line}" for line in without_base(points)), stream=sys.stderr)
            facts += [point.facts for point in points]
            left_out += [f"{place}: {line}" for line in unusable]
        elif given.url:
            of_logs, unusable = read_results(place, given.source, given.url, given.strategy)
            facts += of_logs
            left_out += unusable
        else:
            raise UserError(f"{place} does not say where it is published: give --url")
    new, present, conflicts = add([one.record() for one in facts], given.into)
    left_out += conflicts
    say(*(f"left out: {line}" for line in left_out), stream=sys.stderr)
    counts = f"{new} published measurements added, {present} were there"
    lines = f"{len(left_out)} line{'' if len(left_out) == 1 else 's'} on what is left out"
    say(f"{given.into}: {counts}; {lines}")
    return 0 if new or present else NOTHING


def export_mllog(given: argparse.Namespace) -> int:
    """Write a log of MLPerf Training for each run that ended ok, and the description of its system. They are no MLPerf
    result and say so. Exit code 1 if there is no such run."""
    logs, left_out = export(given.results, given.out)
    say(*(f"left out: {line}" for line in left_out), stream=sys.stderr)
    say(f"{given.out}: {logs} logs, {len(left_out)} runs left out")
    return 0 if logs else NOTHING


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 for errors of the user, 1 if nothing was imported or exported."""
    given = _parser().parse_args(arguments)
    try:
        return given.run(given)
    except RunError as error:
        say(f"ddlbench.exchange: {error}", stream=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddlbench.exchange", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    importing = commands.add_parser("import", help=import_published.__doc__, description=import_published.__doc__)
    importing.set_defaults(run=import_published)
    importing.add_argument(
        "places", nargs="+", type=Path, metavar="PLACE",
        help="a CSV file (docs/published.md), or a folder with result_N.txt of MLPerf Training in it or below",
    )  # fmt: skip
    importing.add_argument(
        "--into", type=Path, default=Path("results/published"), metavar="RESULTS",
        help="folder of results (default: results/published)",
    )  # fmt: skip
    importing.add_argument("--url", help="address at which a folder of MLPerf results is published")
    importing.add_argument("--source", metavar="NAME", help="name of its publication (default: by year and submitter)")
    importing.add_argument(
        "--strategy", default="not stated", metavar="NAME",
        help="way of training in parallel, which its logs do not state (default: not stated)",
    )  # fmt: skip

    exporting = commands.add_parser("export", help=export_mllog.__doc__, description=export_mllog.__doc__)
    exporting.set_defaults(run=export_mllog)
    exporting.add_argument("results", type=Path, metavar="RESULTS", help="results_dir of runs")
    exporting.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
