"""Small studies for the tests of a sweep, and records as their cells would leave them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from ddlbench.config.compose import configuration
from ddlbench.config.keys import added_later
from ddlbench.sweep.plan import Cell, plan
from ddlbench.sweep.study import load

CPU = torch.device("cpu")
KEYS: dict[str, Any] = {
    "model": "resnet50", "model.layers": [1, 1, 1, 1], "model.width_per_group": 8, "model.image_size": 32,
    "loader": "synthetic", "batch": 4, "train.epochs": 1, "train.steps": 2, "train.validate": False,
}  # fmt: skip
SINGLE: dict[str, Any] = {"axes": {"framework": ["single"]}, "exclude": []}


def ddp(*gpus: int) -> dict[str, Any]:
    return {"axes": {"framework": ["ddp"], "gpus": [*gpus]}, "exclude": []}


def write(folder: Path, name: str = "tiny", **content: Any) -> Path:
    """A study's file: one and two ranks of single and ddp, where `content` says nothing else."""
    axes = {"framework": ["single", "ddp"], "gpus": [1, 2]}
    study: dict[str, Any] = {
        "axes": axes,
        "exclude": [{"framework": "single", "gpus": 2}],
        "keys": {key: value for key, value in KEYS.items() if key not in content.get("axes", axes)},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(study | content, sort_keys=False))
    return path


def planned(study: Path, *words: str) -> list[Cell]:
    """The cells of a study's file."""
    return plan(load(str(study), words), CPU)


def record(results: Path, cell: Cell, status: str = "ok", attempt: int = 1, seconds: int = 36, **more: Any) -> Path:
    """The record of a cell that ran from 10:00:00."""
    config = configuration(*cell.words)
    more = {"config_added_later": added_later(config)} | more
    return write_record(
        results, config.resolved, cell.gpus, f"{cell.key}/attempt-{attempt}", status, attempt, seconds, **more
    )


def write_record(
    results: Path,
    config: dict[str, Any],
    gpus: int,
    name: str,
    status: str = "ok",
    attempt: int = 1,
    seconds: int = 36,
    **more: Any,
) -> Path:
    content = {
        "schema_version": 1,
        "status": status,
        "reason": None,
        "config": config,
        "launch": {"world_size": gpus, "nodes": 1},
        "times": {
            "start": f"2026-01-01T1{attempt}:00:00.000+00:00",
            "end": f"2026-01-01T1{attempt}:{seconds // 60:02}:{seconds % 60:02}.000+00:00",
        },
    }
    folder = results / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(content | more))
    return folder


def statuses(results: Path) -> Counter[str]:
    """The attempts by framework, ranks and status."""
    result: Counter[str] = Counter()
    for path in results.glob("*/attempt-*/run.json"):
        record = json.loads(path.read_text())
        place = f"{record['config']['framework']['name']} {record['launch']['world_size']}"
        result[f"{place} {record['status']}"] += 1
    return result


def ranks(results: Path) -> list[psutil.Process]:
    """The processes that run a cell of these results."""
    result: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "ddlbench" in words and any(str(results) in word for word in words):
            result.append(process)
    return result
