"""Measurements that others published: published.jsonl has a record a line.

A record has the sections of run.json, as far as its source states them, its epochs, and a section `published` with the
source and its address. It is a row of the same tables, and neither a repeat nor a base of a run of this program
(docs/adr/0023).
"""

from __future__ import annotations

import re
from pathlib import Path

from ddlbench.foreign import Object, parse, read_bytes
from ddlbench.record.schema import SCHEMA_VERSION
from ddlbench.results.reading.attempts import Attempt, other_version, reason_of, unreadable
from ddlbench.results.rows import PUBLISHED, Row
from ddlbench.texts import digest

GPU = re.compile(
    r"(?:(?<![a-z0-9])|(?<=\dx))(GB[23]00|GH200|B[23]00|H[128]00|H20|A[18]00|A[34]0|L40|L4|T4|V100|P100|P40|K80|MI[0-9]{3}"
    r"|A6000|RTX ?(?:A[0-9]{4}|[0-9]{4}))",
    re.IGNORECASE,
)


def read_published(path: Path) -> list[Attempt]:
    """The records of a published.jsonl; an unreadable attempt where a line, or the file, cannot be used."""
    try:
        lines = read_bytes(path).split(b"\n")
    except (OSError, ValueError) as error:
        return [unreadable(path, f"it cannot be read ({reason_of(error)})")]
    return [_attempt(path.with_name(f"{path.name}:{n}"), line) for n, line in enumerate(lines, 1) if line.strip()]


def _attempt(path: Path, line: bytes) -> Attempt:
    try:
        record = parse(line)
    except ValueError as error:
        return unreadable(path, f"the line cannot be read ({reason_of(error)})")
    if refused := other_version(path, record):
        return refused
    if record.get("status") != "ok":
        return unreadable(path, "a published measurement has the status ok", record["schema_version"])
    return Attempt(path, record | {"origin": PUBLISHED})


def gpu_family(text: str) -> str | None:
    """The GPU that a text names: "A100" of "NVIDIA A100-SXM-80GB (500W)"; None where it names no known one."""
    match = GPU.search(text)
    return re.sub("^RTX ?", "RTX ", match[1].upper()) if match else None


def record_of(facts: Row) -> Object:
    """The record of one run, without what is not known. Its run_id is equal for equal facts, whatever their address.

    facts: the statements of a source, in its words, by the columns of csv_rows.COLUMNS, and:
        sample_time_s, nodes; repeat, recipe, system (the name), seed, train_samples
        series:      what distinguishes runs of the source that have a base of their own from others
        micro_batch: samples of a forward pass
        environment: as in run.json, without the GPU
        summary:     more of run.json's summary than the rates, which follow from sample_time_s
        epochs:      lines as in epochs.jsonl
        more:        other entries of the section `published`
    """
    fact, gpus, rate = facts.get, facts["gpus"], 1 / facts["sample_time_s"]
    tokens, micro_batch = fact("seq_len"), fact("micro_batch")
    config = {
        "mode": "train",
        "source": facts["source"],
        "series": fact("series"),
        "framework": {"name": facts["strategy"], "library": fact("framework")},
        "model": {"name": facts["model"], "tokens_per_sample": tokens},
        "loader": {"name": fact("loader") or None},
        "recipe": {"name": fact("recipe")},
        "cluster": {"name": fact("system")},
        "train": {"precision": fact("precision") or None, "micro_batch": micro_batch, "repeat": fact("repeat", 0)},
    }
    launch = {
        "world_size": gpus,
        "nodes": facts["nodes"],
        "ranks_per_node": gpus // facts["nodes"],
        "device_type": "cuda",
    }
    summary = {"throughput_samples_per_s": rate, "throughput_samples_per_s_per_gpu": rate / gpus}
    if tokens:
        summary["tokens_per_s"] = rate * tokens
    known = {
        "config": config,
        "launch": launch,
        "environment": {"gpu_model": facts["gpu_type"], **fact("environment", {})},
        "framework_library": fact("framework"),
        "model": {"name": facts["model"], "changed": {}, "tokens_per_sample": tokens},
        "dataset": {"train_samples": fact("train_samples")},
        "ledger": {"global_batch": fact("global_batch"), "micro_batch": micro_batch, "seed": fact("seed")},
        "summary": summary | fact("summary", {}),
        "epochs": fact("epochs", []),
    }
    name = re.sub(r"[^a-z0-9.]+", "_", f"{facts['source']} {facts['model']}".lower())[:48].strip("_")
    head = {
        "schema_version": SCHEMA_VERSION,
        "origin": PUBLISHED,
        "run_id": f"{name}-{gpus}x-{digest(known, 12)}",
        "attempt": 1,
        "status": "ok",
    }
    return head | _stated(known | {"published": {"source": facts["source"], "url": facts["url"], **facts["more"]}})


def _stated(values: Object) -> Object:
    """The values that are stated, in sections too; `changed`, which is empty where nothing differs, stays."""
    parts = {
        key: _stated(value) if isinstance(value, dict) and key != "changed" else value for key, value in values.items()
    }
    return {key: value for key, value in parts.items() if key == "changed" or value not in (None, {}, [])}
