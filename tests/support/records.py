"""Records in the format of the harness, with made-up numbers, for the tests of tables, figures and report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from ddlbench.results.reading.attempts import Attempt, read, read_all
from ddlbench.results.tables.merge import Comparison
from ddlbench.results.tables.tables import Tables, make_tables

GIB = 2**30
TEXT = ("gpt2_small", "gpt2_medium")
CPU, GPU = "Example CPU 2.0", "Example GPU 80GB"


def write_run(
    results: Path,
    *,
    framework: str = "ddp",
    model: str = "resnet50",
    gpus: int = 1,
    rate: float = 100.0,
    per_gpu: int | None = 32,
    global_batch: int | None = None,
    repeat: int = 0,
    attempt: int = 1,
    status: str = "ok",
    reason: str | None = None,
    dataset: str | None = "a" * 64,
    device: str = "cuda",
    epochs: int = 3,
    knobs: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    loader: str = "native",
    summary: dict[str, Any] | None = None,
    sections: dict[str, Any] | None = None,
    changed: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    cluster: str = "local",
) -> Path:
    """One attempt at `rate` samples a second over an epoch of 1024 samples; returns its folder."""
    text, ok = model in TEXT, status == "ok"
    batch = global_batch or (per_gpu or 0) * gpus
    config = _config(framework, model, loader, text, knobs or {}, epochs)
    config["train"] |= {"global_batch": global_batch, "batch_per_gpu": per_gpu, "repeat": repeat} | (train or {})
    config["model"] |= changed or {}
    config["recipe"] |= recipe or {}
    config["cluster"]["name"] = cluster
    rows = [_epoch(number, 1024 / rate, batch, text) for number in range(epochs if ok else 0)]
    rows = [row | {name: value for name, value in (summary or {}).items() if name in row} for row in rows]
    short = _short(dataset, knobs, train, changed or recipe) + ("" if cluster == "local" else f"-{cluster}")
    record: dict[str, Any] = {
        "schema_version": 2,
        "run_id": "-".join([framework, model, loader, f"{gpus}x", f"{batch}r{repeat}", short]),
        "attempt": attempt,
        "status": status,
        "reason": reason,
        "times": {"start": f"2026-01-0{attempt}T10:00:00+00:00", "end": f"2026-01-0{attempt}T11:00:00+00:00"},
        "config": config,
        "launch": {"launcher": "torchrun", "world_size": gpus, "nodes": 1, "ranks_per_node": gpus}
        | {"device_type": device, "backend": "nccl" if device == "cuda" else "gloo", "hosts": ["node1"]},
        "environment": _environment(device),
        "dataset": {"name": config["data"]["name"], "hash": dataset, "train_samples": 1024, "val_samples": 500},
    }
    if ok:
        tokens = 1024 if text else None
        record |= {
            "ledger": {"global_batch": batch, "samples": 1024 * epochs, "precision": config["train"]["precision"]}
            | {"micro_batch": None, "data_size": gpus},
            "framework": {"bucket_cap_mb": 25},
            "model": {
                "name": model,
                "changed": changed or {},
                "parameters": 10**6,
                "flops_per_sample": 2e9,
                "tokens_per_sample": tokens,
            },
            "summary": _summary(rate, gpus, device, rows) | (summary or {}),
        }
    folder = results / record["run_id"] / f"attempt-{attempt}"
    write(folder, record | (sections or {}), rows)
    return folder


def write(folder: Path, record: dict[str, Any], epochs: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    if epochs:
        (folder / "epochs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in epochs))


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, Any]]:
    """The record of an attempt, which is written again at the end."""
    record = json.loads((folder / "run.json").read_text())
    yield record
    (folder / "run.json").write_text(json.dumps(record))


def edit_epochs(folder: Path, *changes: dict[str, Any]) -> None:
    """changes: other values of each line of epochs.jsonl, in order"""
    lines = (folder / "epochs.jsonl").read_text().splitlines()
    changed = [json.loads(line) | other for line, other in zip(lines, changes, strict=True)]
    (folder / "epochs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))


def write_repeats(results: Path, *rates: float, **others: Any) -> None:
    """Runs that differ in repeat and samples a second alone."""
    for repeat, rate in enumerate(rates):
        write_run(results, rate=rate, repeat=repeat, **others)


def weak_scaling(results: Path, repeats: int = 1, **others: Any) -> None:
    """Images: single on one GPU, ddp on 1, 2 and 4 at 32 samples a GPU, out of memory on 8.

    samples/s of single 100; of ddp 80, 150, 280: best single-GPU time 1/100 s a sample; own base of ddp 1/80 s.
    """
    for repeat in range(repeats):
        more = 1 + repeat / 100  # repeats differ by one percent each
        write_run(results, framework="single", rate=100 * more, repeat=repeat, **others)
        for gpus, rate in ((1, 80.0), (2, 150.0), (4, 280.0)):
            write_run(results, gpus=gpus, rate=rate * more, repeat=repeat, **others)
    write_run(results, gpus=8, status="oom", reason="CUDA out of memory", **others)


def strong_scaling(results: Path, **others: Any) -> None:
    """Text: ddp on 2, 4 and 8 GPUs at 64 samples an update; 10, 19 and 32 samples/s."""
    for gpus, rate in ((2, 10.0), (4, 19.0), (8, 32.0)):
        write_run(results, model="gpt2_small", gpus=gpus, rate=rate, per_gpu=None, global_batch=64, **others)


def attempts_of(*results: Path) -> list[Attempt]:
    """All attempts below the folders."""
    return list(map(read, read_all(results).folders))


def tables_of(*results: Path, by: str = "framework", across: Sequence[str] = ()) -> Tables:
    """The tables of a report of folders of results. by: factors with a comma between them"""
    return make_tables(read_all(results), Comparison(tuple(by.split(",")), tuple(across)))


def _short(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def _config(framework: str, model: str, loader: str, text: bool, knobs: dict[str, Any], epochs: int) -> dict[str, Any]:
    return {
        "mode": "train",
        "results_dir": "results",
        "framework": {"_target_": "x.Y", "name": framework} | (knobs if framework != "single" else {}),
        "model": {"_target_": "x.Y", "name": model},
        "loader": {"_target_": "x.Y", "name": loader},
        "data": {"_target_": "x.Y", "name": "sample_text" if text else "sample_images", "root": None},
        "recipe": {"_target_": "x.Y", "name": "adamw" if text else "sgd"},
        "cluster": {"_target_": "x.Y", "name": "local"},
        "train": {"epochs": epochs, "steps": None, "warmup_steps": 2, "precision": "fp32", "seed": 0},
    }


def _environment(device: str) -> dict[str, Any]:
    return {
        "python": "3.11.2",
        "torch": "2.14.1",
        "cuda": "13.0",
        "cpu_model": CPU,
        "gpu_model": GPU if device == "cuda" else None,
        "git_commit": "0123456789abcdef",
        "git_dirty": False,
    }


def _epoch(number: int, seconds: float, batch: int, text: bool) -> dict[str, Any]:
    quality: dict[str, Any] = (
        {"val_perplexity_token": 400.0 / (number + 1), "val_perplexity_word": 900.0 / (number + 1)}
        if text
        else {"val_top1": 0.8 - 0.5 / (number + 1), "val_top5": 0.95 - 0.3 / (number + 1)}
    )
    return {
        "epoch": number,
        "steps": 1024 // batch,
        "samples": 1024,
        "warmup": number == 0,
        "epoch_time_s": seconds,
        "elapsed_s": (number + 1) * (seconds + 2.0),
        "train_loss": 2.0 / (number + 1),
        "val_loss": 2.2 / (number + 1),
        "val_samples": 500,
        "validation_time_s": 2.0,
        **quality,
    }


def _summary(rate: float, gpus: int, device: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("val_loss", "val_top1", "val_top5", "val_perplexity_token", "val_perplexity_word", "val_samples")
    last = deepcopy(rows[-1])
    return {
        "epochs_done": len(rows),
        "epochs_measured": max(1, len(rows) - 1),
        "epoch_time_s": 1024 / rate,
        "throughput_samples_per_s": rate,
        "throughput_samples_per_s_per_gpu": rate / gpus,
        "model_flops_per_s_per_gpu": 2e9 * rate / gpus,
        "mfu": 2e9 * rate / gpus / 1e12 if device == "cuda" else None,
        "memory_allocated_peak_bytes": 3 * GIB + gpus * GIB // 8 if device == "cuda" else None,
        "memory_host_peak_bytes": 2 * GIB,
        "validation_time_s": 2.0,
        **{name: last[name] for name in names if name in last},
    }
