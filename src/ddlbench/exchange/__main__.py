"""python -m ddlbench.exchange: import published measurements, export own records as logs of MLPerf Training, for tools
that read them.

A record has durations and one time stamp, that of its start. The time stamps of a log are this start plus durations. So
they do not contain what happens between epochs (checkpoints, a profiled window).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ddlbench.command import ended, given_path
from ddlbench.errors import UserError, reporting
from ddlbench.files import replacing
from ddlbench.foreign import Object, section
from ddlbench.record.files import plain, write_json
from ddlbench.results.reading.attempts import PUBLISHED_FILE, read_all, read_published
from ddlbench.results.reading.mlperf import TOKEN, read_results
from ddlbench.results.reading.published import read_points, record_of
from ddlbench.results.rows import OWN, Row, group_by
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.tables import merge
from ddlbench.texts import counted, digest, first_few, say

NOTHING = 1  # exit code
NO_SUBMISSION = "none: not an MLPerf submission"
BENCHMARKS = {"resnet50": "resnet"}  # models that MLPerf Training has a benchmark of; its open division takes any size
# Parts of the start-up. The record is opened between them, and its start is that time.
BEFORE, AFTER = ("imports_s", "connecting_s", "data_preparation_s"), ("staging_s", "preflight_s", "setup_s")


def import_published(given: argparse.Namespace) -> int:
    """Add measurements that others published to RESULTS/published.jsonl: rows of the same tables and figures as own
    ones. Exit code 1 if no measurement could be used."""
    facts, left_out = list[Row](), list[str]()
    for place in given.places:
        if not place.is_dir():
            points, unusable = read_points(place)
            if alone := [str(point["line"]) for point in points if "base_gpus" not in point["more"]]:
                rows = ", ".join(first_few(alone, 20))
                say(f"{place}: row {rows}: without a base: efficiency stays empty", stream=sys.stderr)
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
    say(f"{given.into}: {counts}; {counted(len(left_out), 'line')} on what is left out")
    return 0 if new or present else NOTHING


def add(records: Sequence[Object], results: Path) -> tuple[int, int, list[str]]:
    """Add new records to the published measurements of a results folder. UserError where its file cannot be read
    completely, or written.

    Returns how many were added, how many were stored before, and a line for each that contradicts another.
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
            left_out.append(f"{name} ({section(record, 'published').get('url')}): {reason}")
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
    # A table may have been made from logs. Logs lie in a folder, and only their records have a time to train.
    for other in others:
        sources = [section(source, "published") for source in (record, other)]
        urls = [f"{str(source.get('url')).removesuffix('/')}/" for source in sources]
        logs = ["time_to_train_s" in source for source in sources]
        if logs[0] != logs[1] and (urls[0].startswith(urls[1]) or urls[1].startswith(urls[0])):
            return f"its source is imported already as {sources[1].get('url')}"
    return None


def _configuration(record: Object) -> str:
    return digest([section(record, "config"), section(record, "launch"), section(record, "environment")], 32)


def export_mllog(given: argparse.Namespace) -> int:
    """Write a folder for each measurement, with a log of MLPerf Training for each of its runs that ended ok and the
    description of the system. They are no MLPerf result and say so. Exit code 1 if there is no such run."""
    logs, left_out = list[tuple[AttemptRow, bytes]](), list[str]()
    for run in merge(read_all([given.results])).runs:
        try:
            if run.row["origin"] == OWN:
                logs.append((run, b"".join(_lines(run))))
        except ValueError as error:
            left_out.append(f"{run.row['path']}: {error}")
    for measurement, same in group_by(logs, lambda log: log[0].row["measurement"]).items():
        row = same[0][0].row
        names = "-".join(str(row[name]).replace("/", "_") for name in ("framework", "model"))
        folder = given.out / f"{names}-{row['gpus']}x-{measurement}"
        with reporting(f"{folder} cannot be written", "choose another --out"):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "system.json", _system(row))
            for log in folder.glob("result_*.txt"):  # of an earlier export, which may have had more runs
                log.unlink()
            for number, (_, content) in enumerate(same):
                with replacing(folder / f"result_{number}.txt") as file:
                    file.write(content)
    say(*(f"left out: {line}" for line in left_out), stream=sys.stderr)
    say(f"{given.out}: {len(logs)} logs, {len(left_out)} runs left out")
    return 0 if logs else NOTHING


def _lines(run: AttemptRow) -> Iterator[bytes]:
    """The lines of a log, without unknown values. ValueError with the reason where the record has too little."""
    row, options, epochs = run.row, run.options, run.epochs.to_pylist()
    if row["status"] != "ok" or row["measurement"] is None or row["mode"] != "train":
        raise ValueError(f"it is no training that ended ok (mode {row['mode']}, status {row['status']})")
    if row["resumed_attempt"] is not None:
        raise ValueError("it continues an earlier attempt")
    needed = ("epoch_time_s", "elapsed_s", "samples")
    if not epochs or row["start"] is None or any(line[name] is None for line in epochs for name in needed):
        raise ValueError(f"its record lacks its start, or {', '.join(needed)} of an epoch")
    opened = datetime.fromisoformat(row["start"]).timestamp()
    start = opened - sum(row[name] or 0.0 for name in BEFORE)
    begin = opened + sum(row[name] or 0.0 for name in AFTER)
    values: Row = {
        "cache_clear": bool(options.get("train.cold_cache")),
        "submission_benchmark": BENCHMARKS.get(str(row["model"]), str(row["model"])),
        "submission_org": NO_SUBMISSION,
        "submission_division": "open",
        "submission_status": "research",
        "submission_platform": row["cluster"] or "unknown",
        "seed": row["seed"],
        "global_batch_size": row["global_batch"],
        "gradient_accumulation_steps": row["micro_batches"],
        "train_samples": epochs[0]["samples"],
        "eval_samples": row["val_samples"],
        "opt_name": options.get("recipe.optimizer.name"),
        "opt_base_learning_rate": options.get("recipe.optimizer.lr"),
        "opt_weight_decay": row["weight_decay"],
    }
    yield from (_line(start, key, value) for key, value in values.items() if value is not None)
    yield _line(start, "init_start", event="INTERVAL_START")
    yield _line(begin, "init_stop", event="INTERVAL_END")
    yield _line(begin, "run_start", event="INTERVAL_START")
    for line in epochs:
        yield from _epoch(begin, line)
    yield _line(begin + epochs[-1]["elapsed_s"], "run_stop", event="INTERVAL_END", status="success")


def _epoch(begin: float, line: Row) -> Iterator[bytes]:
    """The lines of an epoch, which ends where its validation begins. The accuracy is top-1 for images and the loss for
    text, as in MLPerf's language models."""
    number, validation_s = line["epoch"] + 1, line["validation_time_s"] or 0.0
    end = begin + line["elapsed_s"]
    trained = end - validation_s
    yield _line(trained - line["epoch_time_s"], "epoch_start", event="INTERVAL_START", epoch_num=number)
    yield _line(trained, "epoch_stop", event="INTERVAL_END", epoch_num=number)
    quality = line["val_loss"] if line["val_top1"] is None else line["val_top1"]
    if quality is not None:
        yield _line(trained, "eval_start", event="INTERVAL_START", epoch_num=number)
        yield _line(end, "eval_stop", event="INTERVAL_END", epoch_num=number)
        yield _line(end, "eval_accuracy", quality, epoch_num=number)


def _line(seconds: float, key: str, value: Any = None, event: str = "POINT_IN_TIME", **metadata: Any) -> bytes:
    names = {"namespace": "ddlbench", "time_ms": round(1e3 * seconds), "event_type": event, "key": key, "value": value}
    return TOKEN + json.dumps(names | {"metadata": metadata}).encode() + b"\n"


def _system(row: Row) -> Row:
    """The description of the system, with the keys of submissions and without unknown values. Ranks on CPUs have no
    accelerator."""
    gpu = row["device"] == "cuda"
    values = {
        "submitter": NO_SUBMISSION,
        "division": "open",
        "status": "research",
        "system_name": row["cluster"],
        "number_of_nodes": row["nodes"],
        "accelerators_per_node": row["ranks_per_node"] if gpu else 0,
        "accelerator_model_name": row["device_model"] if gpu else "N/A",
        "host_processor_model_name": "N/A" if gpu else row["device_model"],
        "framework": row["framework_library"],
        "sw_notes": f"written by ddlbench {row['ddlbench'] or '(unknown)'} from a record of its own: {NO_SUBMISSION}",
    }
    return {key: str(value) for key, value in values.items() if value is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 for errors of the user, 1 if nothing was imported or exported."""
    parser = argparse.ArgumentParser(prog="python -m ddlbench.exchange", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("import", help=import_published.__doc__, description=import_published.__doc__)
    command.set_defaults(run=import_published)
    add = command.add_argument
    # fmt: off
    add("places", nargs="+", type=given_path, metavar="PLACE",
        help="a CSV file (docs/published.md), or a folder with result_N.txt of MLPerf Training in it or below")
    add("--into", type=given_path, default=Path("results/published"), metavar="RESULTS",
        help="folder of results (default: results/published)")
    add("--url", help="address at which a folder of MLPerf results is published")
    add("--source", metavar="NAME", help="name of its publication (default: by year and submitter)")
    add("--strategy", default="not stated", metavar="NAME",
        help="way of training in parallel, which its logs do not state (default: not stated)")
    # fmt: on
    command = commands.add_parser("export", help=export_mllog.__doc__, description=export_mllog.__doc__)
    command.set_defaults(run=export_mllog)
    command.add_argument("results", type=given_path, metavar="RESULTS", help="results_dir of runs")
    command.add_argument("--out", type=given_path, required=True, metavar="DIR", help="folder of the logs")
    given = parser.parse_args(arguments)
    return ended("ddlbench.exchange", lambda: given.run(given))


if __name__ == "__main__":
    sys.exit(main())
