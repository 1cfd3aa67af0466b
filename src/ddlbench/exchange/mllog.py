"""Own records as logs of MLPerf Training, for tools that read them. They claim no MLPerf result, and say so.

A record has durations, and one time stamp, of its start. The time stamps of a log are that start and durations, so
that they do not contain what lies between epochs (checkpoints, a profiled window).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from ddlbench.errors import reporting
from ddlbench.files import replacing
from ddlbench.record.files import write_json
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.reading.mlperf import TOKEN
from ddlbench.results.rows import OWN, Row, group_by
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.tables import merge

NO_SUBMISSION = "none: not an MLPerf submission"
BENCHMARKS = {"resnet50": "resnet"}  # models that MLPerf Training has a benchmark of; its open division takes any size
# Parts of the start-up. A record is opened between them, and has that time as its start.
BEFORE, AFTER = ("imports_s", "connecting_s", "data_preparation_s"), ("staging_s", "preflight_s", "setup_s")


def export(results: Path, out: Path) -> tuple[int, list[str]]:
    """Write a folder for each measurement, with a log for each of its runs that ended ok and the description of the
    system. Returns the number of logs, and a line for each run without one. UserError where `out` cannot be written."""
    runs = [run for run in merge(read_all([results])).runs if run.row["origin"] == OWN]
    logs, left_out = list[tuple[AttemptRow, bytes]](), list[str]()
    for run in runs:
        try:
            logs.append((run, b"".join(_lines(run))))
        except ValueError as error:
            left_out.append(f"{run.row['path']}: {error}")
    for measurement, same in group_by(logs, lambda log: log[0].row["measurement"]).items():
        row = same[0][0].row
        names = "-".join(str(row[name]).replace("/", "_") for name in ("framework", "model"))
        folder = out / f"{names}-{row['gpus']}x-{measurement}"
        with reporting(f"{folder} cannot be written", "choose another --out"):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "system.json", _system(row))
            for number, (_, content) in enumerate(same):
                with replacing(folder / f"result_{number}.txt") as file:
                    file.write(content)
    return len(logs), left_out


def _lines(run: AttemptRow) -> Iterator[bytes]:
    """The lines of a log; unknown values are left out. ValueError with the reason where the record has too little."""
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
    """The epoch ends where its validation begins. Its accuracy is top-1 of images; of text it is the loss, as in
    MLPerf's language models."""
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
    """The description of the system, as submissions have it. Ranks on CPUs have no accelerator."""
    gpu = row["device"] == "cuda"
    return {
        "submitter": NO_SUBMISSION,
        "division": "open",
        "status": "research",
        "system_name": row["cluster"],
        "number_of_nodes": str(row["nodes"]),
        "accelerators_per_node": str(row["ranks_per_node"] if gpu else 0),
        "accelerator_model_name": row["device_model"] if gpu else "N/A",
        "host_processor_model_name": "N/A" if gpu else row["device_model"],
        "framework": row["framework_library"],
        "sw_notes": f"written by ddlbench {row['ddlbench']} from a record of its own: {NO_SUBMISSION}",
    }
