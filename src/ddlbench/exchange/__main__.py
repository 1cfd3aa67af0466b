"""python -m ddlbench.exchange: import published measurements, export own records as logs of MLPerf Training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ddlbench.errors import RunError, UserError, reporting
from ddlbench.exchange.mllog import export
from ddlbench.files import replacing
from ddlbench.foreign import Object
from ddlbench.record.files import plain
from ddlbench.results.reading.attempts import PUBLISHED_FILE
from ddlbench.results.reading.csv_rows import read_points, without_base
from ddlbench.results.reading.mlperf import read_results
from ddlbench.results.reading.published import read_published, record_of
from ddlbench.results.rows import Row, section
from ddlbench.texts import digest, say

NOTHING = 1  # exit code


def import_published(given: argparse.Namespace) -> int:
    """Add measurements that others published to RESULTS/published.jsonl: rows of the same tables and figures as own
    ones. Exit code 1 if no measurement could be used."""
    facts, left_out = list[Row](), list[str]()
    for place in given.places:
        if not place.is_dir():
            points, unusable = read_points(place)
            say(*(f"{place}: {line}" for line in without_base(points)), stream=sys.stderr)
            facts += points
            left_out += [f"{place}: {line}" for line in unusable]
        elif given.url:
            of_logs, unusable = read_results(place, given.source, given.url, given.strategy)
            facts += of_logs
            left_out += unusable
        else:
            raise UserError(f"{place} does not say where it is published: give --url")
    new, present, conflicts = add(list(map(record_of, facts)), given.into)
    left_out += conflicts
    say(*(f"left out: {line}" for line in left_out), stream=sys.stderr)
    counts = f"{new} published measurements added, {present} were there"
    lines = f"{len(left_out)} line{'' if len(left_out) == 1 else 's'} on what is left out"
    say(f"{given.into}: {counts}; {lines}")
    return 0 if new or present else NOTHING


def add(records: Sequence[Object], results: Path) -> tuple[int, int, list[str]]:
    """Add what is new to the published measurements of a results folder. UserError where its file cannot be read
    completely, or written.

    Returns the number of those that were added, the number of those that were stored already, and a line for each
    that contradicts another.
    """
    path, stored = results / PUBLISHED_FILE, list[Object]()
    for attempt in read_published(path) if path.exists() else []:
        if attempt.record["status"] == "unreadable":
            raise UserError(f"{attempt.name}: {attempt.record['reason']}: repair or remove it, then import again")
        stored.append(attempt.record)
    names = {str(record.get("run_id")) for record in stored}
    by_configuration = {_configuration(record): record for record in stored}
    present, left_out, new = 0, list[str](), dict[str, Object]()
    for record in map(plain, records):
        name, configuration = record["run_id"], _configuration(record)
        if name in names:
            present += 1
        elif reason := _conflict(record, by_configuration.get(configuration), [*stored, *new.values()]):
            left_out.append(f"{name} ({_url(record)}): {reason}")
        else:
            new[name] = by_configuration[configuration] = record
    if new:
        with reporting(f"{path} cannot be written", "choose another --into"):
            results.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                for record in (*stored, *new.values()):
                    file.write(f"{json.dumps(record, separators=(',', ':'))}\n".encode())
    return len(new), present, left_out


def _conflict(record: Object, same: Object | None, others: Sequence[Object]) -> str | None:
    """Why a record contradicts others; None if it does not. same: a stored record of its configuration and repeat"""
    if same is not None:
        if same.get("run_id") == record["run_id"]:
            return "it is given twice"
        return f"{same.get('run_id')} is another value of its configuration and repeat"
    # A table may have been made from logs. Logs are a folder, and only their records have a time to train.
    for other in others:
        urls = [f"{_url(source).removesuffix('/')}/" for source in (record, other)]
        logs = ["time_to_train_s" in section(source, "published") for source in (record, other)]
        if logs[0] != logs[1] and (urls[0].startswith(urls[1]) or urls[1].startswith(urls[0])):
            return f"its source is imported already as {_url(other)}"
    return None


def _configuration(record: Object) -> str:
    return digest([section(record, "config"), section(record, "launch"), section(record, "environment")], 32)


def _url(record: Object) -> str:
    return str(section(record, "published").get("url"))


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
