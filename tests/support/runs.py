"""Command lines of short runs on one rank, their configuration, and the record that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config

OF_IMAGES = ["+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32"]
SMALL = [
    "+framework=single", *OF_IMAGES, "loader=synthetic", "train.global_batch=4", "train.steps=3", "train.epochs=2",
    "data.val_limit=6",
]  # fmt: skip
RESNET = ["+framework=single", *OF_IMAGES, "train.global_batch=4", "train.steps=2", "train.epochs=1"]
GPT2 = [
    "+framework=single", "+model=gpt2_small", "model.n_layer=1", "model.n_embd=32", "model.n_head=2",
    "train.global_batch=2", "train.steps=2", "train.epochs=1",
]  # fmt: skip


def composed(*words: str) -> Config:
    return configuration(*words)


def record(folder: Path, attempt: int = 1) -> dict[str, Any]:
    """The record of the only run below this folder."""
    (path,) = folder.glob(f"**/attempt-{attempt}/run.json")
    return json.loads(path.read_text())


def epochs(folder: Path, attempt: int = 1) -> list[dict[str, Any]]:
    """The epochs that this run, if there is one, has recorded."""
    files = folder.glob(f"**/attempt-{attempt}/epochs.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
