"""A Markdown table of the records below a folder, for docs/measurements.

python scripts/measurements.py RESULTS            the table; before it what came of each check, where there were any
python scripts/measurements.py --status RESULTS [START]   the status of the newest record, for scripts: of those
                                                          that began at START or later (a time as in a record)
python scripts/measurements.py --same-losses A B  exit code 1 unless each step's loss is the same, but for 1 %
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from ddlbench.texts import gib, markdown_table, percent

COLUMNS = ("check", "model", "framework", "GPUs", "loader", "precision", "batch", "compile", "status", "samples/s",
           "tokens/s", "MFU", "data wait", "peak allocated")  # fmt: skip


def main(folder: Path) -> None:
    paths = sorted(folder.rglob("attempt-*/run.json"))
    if not paths:
        raise SystemExit(f"no record below {folder}: run scripts/gpu_check.sh first")
    records = [json.loads(path.read_text()) for path in paths]
    environment = records[0]["environment"]
    print(f"Device: {environment['gpu_model'] or environment['cpu_model']}, driver {environment['driver']}")
    print(f"Versions: Python {environment['python']}, torch {environment['torch']}, CUDA {environment['cuda']}")
    print(f"Date: {records[0]['times']['start'][:10]}; commit {environment['git_commit']}\n")
    lines = [line.split("\t") for path in sorted(folder.rglob("checks.tsv")) for line in path.read_text().splitlines()]
    if lines:  # of a check that was done again, the last
        print(markdown_table(("check", "result", "seconds"), {line[0]: line for line in lines}.values()))
    # .../part/check/<run_id>/attempt-<n>/run.json
    names = [path.parents[2].relative_to(folder).as_posix() for path in paths]
    print(markdown_table(COLUMNS, map(cells, names, records)))


def cells(check: str, record: dict[str, Any]) -> list[str]:
    config, summary = record["config"], record.get("summary", {})
    rates = (summary.get(name) for name in ("throughput_samples_per_s", "tokens_per_s"))
    return [
        check,
        config["model"]["name"],
        config["framework"]["name"],
        str(record["launch"]["world_size"]),
        config["loader"]["name"],
        config["train"]["precision"],
        str((record.get("ledger") or {}).get("global_batch", "")),
        str(config["train"]["compile"]),
        record["status"],
        *("" if rate is None else f"{rate:,.0f}" for rate in rates),
        percent(summary.get("mfu")),
        percent(summary.get("data_wait_share")),
        gib(summary.get("memory_allocated_peak_bytes")),
    ]


def status(folder: Path, start: str = "") -> str:
    records = [json.loads(path.read_text()) for path in folder.rglob("attempt-*/run.json")]
    statuses = {began: record["status"] for record in records if (began := record["times"]["start"]) >= start}
    return statuses[max(statuses)] if statuses else "no record"


def differing_losses(*folders: Path) -> str | None:
    """The first step whose losses, means over the ranks, differ; None where all are the same."""
    import pandas as pd

    first, second = (
        pd.concat(map(pd.read_parquet, folder.rglob("steps.parquet"))).groupby(["epoch", "step"])["loss"].mean()
        for folder in folders
    )
    if len(first) != len(second):
        return f"{len(first)} steps and {len(second)} steps"
    for (epoch, step), one in first.items():
        if not math.isclose(one, other := second[epoch, step], rel_tol=0.01):
            return f"epoch {epoch}, step {step}: losses {one:.5g} and {other:.5g}"
    return None


if __name__ == "__main__":
    if sys.argv[1] == "--status":
        print(status(Path(sys.argv[2]), *sys.argv[3:]))
    elif sys.argv[1] == "--same-losses":
        sys.exit(differing_losses(*map(Path, sys.argv[2:])))
    else:
        main(Path(sys.argv[1]))
