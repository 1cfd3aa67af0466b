"""Published measurements with made-up numbers: CSV files, and logs and systems of MLPerf Training."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from ddlbench.results.reading.published import COLUMNS, read_points, record_of

URL = "https://example.org/results"
START_MS = 1_600_000_000_000  # in September 2020
# Four epochs of 100 s, the first of 104 s, in two blocks, with an evaluation of 2 s at the end of each.
TRAINED_MS = (104_000, 100_000, 100_000, 100_000)


def cells(**changed: Any) -> dict[str, Any]:
    """A row of a CSV file: 8 GPUs at 760 images/s, its base 1 GPU at 100. 64 images a GPU take 673.684 ms a step."""
    row = dict.fromkeys(COLUMNS, "") | {
        "source": "Example 2020", "model": "ResNet-50", "framework": "PyTorch 1.6", "strategy": "DDP", "gpus": 8,
        "gpus_per_node": 8, "gpu_type": "V100-SXM2-16GB", "network": "NVLink", "batch_per_gpu": 64,
        "global_batch": 512, "precision": "fp16", "measured": 760, "unit": "img/s", "one_gpu_value": 100,
        "base_gpus": 1, "base_value": 100, "step_ms": 673.684, "loader": "DALI", "in_scope": "yes", "tier": "A",
        "quote": "| 8 | 760 |", "url": f"{URL}/README.md#L1",
    }  # fmt: skip
    return row | changed


def write_csv(path: Path, *rows: dict[str, Any]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def csv_facts(folder: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """What the rows of a CSV file state."""
    return read_points(write_csv(folder / "points.csv", *rows))[0]


def store(folder: Path, facts: list[dict[str, Any]]) -> None:
    """The file of results that an import makes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "published.jsonl").write_text("".join(json.dumps(record_of(one)) + "\n" for one in facts))


def system(**changed: Any) -> dict[str, Any]:
    return {
        "submitter": "Example",
        "system_name": "2xExample",
        "number_of_nodes": "2",
        "accelerators_per_node": "4",
        "accelerator_model_name": "NVIDIA A100-SXM4-40GB",
        "host_processor_model_name": "Example CPU",
        "host_networking": "2x HDR",
        "framework": "MXNet 21.05",
        "accelerator_frequency": "N/A",
    } | changed


def event(ms: int, key: str, value: Any = None, **metadata: Any) -> dict[str, Any]:
    """An event, `ms` after the start of the run."""
    return {"time_ms": START_MS + ms, "key": key, "value": value, "metadata": metadata}


def events(trained_ms: tuple[int, ...] = TRAINED_MS, top1: float = 0.5) -> list[dict[str, Any]]:
    """The events of a run: top-1 grows by 0.1 from block to block."""
    listed = [
        event(-9_000, "submission_benchmark", "resnet"), event(-9_000, "submission_org", "Example"),
        event(-8_000, "seed", 7), event(-8_000, "global_batch_size", 512), event(-8_000, "opt_name", "lars"),
        event(0, "run_start"), event(1, "train_samples", 51_200), event(1, "eval_samples", 500),
    ]  # fmt: skip
    now = 1_000
    for first in range(0, len(trained_ms), 2):
        number = first + 1
        listed.append(event(now, "block_start", first_epoch_num=first + 1, epoch_count=2))
        for number, ms in enumerate(trained_ms[first : first + 2], first + 1):
            listed += [event(now, "epoch_start", epoch_num=number), event(now + ms, "epoch_stop", epoch_num=number)]
            now += ms
        listed += [event(now, "eval_start", epoch_num=number), event(now + 2_000, "eval_stop", epoch_num=number)]
        now += 2_000
        listed += [event(now, "eval_accuracy", top1 + first / 20, epoch_num=number)]
        listed += [event(now, "block_stop", first_epoch_num=first + 1)]
    return [*listed, event(now, "run_stop", status="success")]


def log_text(listed: list[dict[str, Any]]) -> str:
    return "".join(f":::MLLOG {json.dumps(one)}\n" for one in listed)


def write_results(folder: Path, *runs: list[dict[str, Any]], **described: Any) -> Path:
    """A folder of results: a log for each list of events, and the system."""
    folder.mkdir(parents=True)
    (folder / "system.json").write_text(json.dumps(system(**described)))
    for number, listed in enumerate(runs or (events(),)):
        (folder / f"result_{number}.txt").write_text(log_text(listed))
    return folder
