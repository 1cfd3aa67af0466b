"""Measurements that others published: published.jsonl has a record a line.

A record has the sections of run.json, as far as its source states them, its epochs, and a section `published` with the
source and its address. It is a row of the same tables, and neither a repeat nor a base of a run of this program
(docs/adr/0023).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddlbench.foreign import Object, parse, read_bytes
from ddlbench.record.schema import SCHEMA_VERSION
from ddlbench.results.reading.attempts import Attempt, other_version, reason_of, unreadable
from ddlbench.results.rows import PUBLISHED
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


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The statements of a source on one run; None for what it does not state.

    model, strategy, library, gpu, precision, loader, recipe, system: in the source's words
    series:        what distinguishes runs of the source that have a base of their own from others
    micro_batch:   samples of a forward pass; tokens: of a sample
    line:          of the file; not in the record
    environment:   as in run.json
    summary:       more of run.json's summary than the rates, which follow from sample_time_s
    epochs:        lines as in epochs.jsonl
    more:          other entries of the section `published`
    """

    source: str
    url: str
    model: str
    strategy: str
    library: str | None
    gpu: str
    gpus: int
    nodes: int
    sample_time_s: float
    global_batch: int | None
    repeat: int = 0
    series: str | None = None
    micro_batch: int | None = None
    tokens: int | None = None
    precision: str | None = None
    loader: str | None = None
    recipe: str | None = None
    system: str | None = None
    line: int | None = None
    seed: int | None = None
    train_samples: int | None = None
    environment: Object = field(default_factory=dict[str, Any])
    summary: Object = field(default_factory=dict[str, Any])
    epochs: Sequence[Object] = ()
    more: Object = field(default_factory=dict[str, Any])

    def record(self) -> Object:
        """The record, without what is not known. Its run_id is equal for equal facts, whatever their address."""
        config = {
            "mode": "train",
            "source": self.source,
            "series": self.series,
            "framework": {"name": self.strategy, "library": self.library},
            "model": {"name": self.model, "tokens_per_sample": self.tokens},
            "loader": {"name": self.loader},
            "recipe": {"name": self.recipe},
            "cluster": {"name": self.system},
            "train": {"precision": self.precision, "micro_batch": self.micro_batch, "repeat": self.repeat},
        }
        launch = {
            "world_size": self.gpus,
            "nodes": self.nodes,
            "ranks_per_node": self.gpus // self.nodes,
            "device_type": "cuda",
        }
        rate = 1 / self.sample_time_s
        summary = {"throughput_samples_per_s": rate, "throughput_samples_per_s_per_gpu": rate / self.gpus}
        if self.tokens:
            summary["tokens_per_s"] = rate * self.tokens
        facts = {
            "config": config,
            "launch": launch,
            "environment": {"gpu_model": self.gpu, **self.environment},
            "framework_library": self.library,
            "model": {"name": self.model, "changed": {}, "tokens_per_sample": self.tokens},
            "dataset": {"train_samples": self.train_samples},
            "ledger": {"global_batch": self.global_batch, "micro_batch": self.micro_batch, "seed": self.seed},
            "summary": summary | self.summary,
            "epochs": list(self.epochs),
        }
        name = re.sub(r"[^a-z0-9.]+", "_", f"{self.source} {self.model}".lower())[:48].strip("_")
        head = {
            "schema_version": SCHEMA_VERSION,
            "origin": PUBLISHED,
            "run_id": f"{name}-{self.gpus}x-{digest(facts, 12)}",
            "attempt": 1,
            "status": "ok",
        }
        return head | _stated(facts | {"published": {"source": self.source, "url": self.url, **self.more}})


def _stated(values: Object) -> Object:
    """The values that are stated, in sections too; `changed`, which is empty where nothing differs, stays."""
    parts = {
        key: _stated(value) if isinstance(value, dict) and key != "changed" else value for key, value in values.items()
    }
    return {key: value for key, value in parts.items() if key == "changed" or value not in (None, {}, [])}
