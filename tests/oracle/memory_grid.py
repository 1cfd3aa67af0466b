"""Predicted bytes of the fullest rank beside those that a rehearsal of the same job counts, for a grid of small jobs.

python -m tests.oracle.memory_grid --frameworks zero3 gpipe --ranks 4 --keep FILE.jsonl

Rows that the file has are not rehearsed again, but predicted anew. At the end is a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import RunError
from ddlbench.oracle.machine.machine import Link, load
from ddlbench.oracle.measured.inputs import OneStep
from ddlbench.oracle.predictor import Prediction
from ddlbench.oracle.strategies.traced import distinct_ranks
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.rehearse import rehearse
from tests.oracle.made import by_one_step
from tests.support.libraries import why_no_horovod
from tests.support.rehearsals import MODELS

MACHINE = replace(load("local"), links=(Link("made", 1e-6, 1e9),) * 2, cores=2)
RANKS = (2, 4, 8)
VARIANTS = {
    "plain": (),
    "accumulated": ("train.micro_batch=2",),
    "checkpointed": ("train.checkpoint_activations=true",),
}
OF_SOME = {  # frameworks
    # Of every rank what its shards are; small enough that the gradients of these models fill several.
    "buckets": ("framework.reduce_bucket_mb=0.25",),
    "cast": ("train.precision=bf16", "framework.mixed_precision=weights"),  # DeepSpeed's weights in 16 bits
    "gathered": ("framework.parallel_loss=false",),  # logits on each rank of tensor; not in the grid
    "apart": ("framework.gradient_as_bucket_view=false",),  # gradients beside DDP's buckets; not in the grid
    "replicated": ("framework.replicate=2",),  # HSDP: two replicas of shards
    "sharded": ("framework.dp=2", "framework.sharded=true"),  # pipelines whose replicas share the update
}
OF_SEGMENTS = {  # of GPT-2, whose activations of four samples take 0.00061 GiB without a second run
    "every:2": ("train.checkpoint_activations=every:2",),
    "listed": ("train.checkpoint_activations=[h0]",),
    "budget": ("train.checkpoint_activations=budget:0.0003",),
    "selective": ("train.checkpoint_activations=selective",),
}
ZERO = ("zero1", "zero2", "zero3")
TWO_STAGES_A_RANK = ("interleaved", "looped_bfs", "zbv", "dualpipev")
PIPELINES = ("gpipe", "1f1b", "zero_bubble", "pipedream", "pipedream_2bw", *TWO_STAGES_A_RANK)
SHARED = ("tensor", "megatron", "channel", "spatial")
FRAMEWORKS = ("ddp", "horovod", "local_sgd", "zero0", *ZERO, "fsdp", *SHARED, *PIPELINES, "hybrid")


@dataclass(frozen=True)
class Case:
    framework: str
    model: str
    ranks: int
    variant: str

    @property
    def words(self) -> tuple[str, ...]:
        """Four samples a GPU."""
        size = (f"+framework={self.framework}", f"+model={self.model}", *MODELS[self.model], "train.batch_per_gpu=4")
        tied = self.framework == "pipedream" and self.model == "gpt2_small"  # which it refuses
        more = (VARIANTS | OF_SOME | OF_SEGMENTS)[self.variant]
        degrees = () if self.variant == "sharded" else layout(self.framework, self.ranks)
        return (*size, *degrees, *(("model.tie_weights=false",) if tied else ()), *more)


@dataclass(frozen=True)
class Row:
    """Bytes of the fullest rank. reason: why there is nothing to compare."""

    case: Case
    predicted: float | None = None
    counted: float | None = None
    reason: str = ""

    @property
    def error(self) -> float | None:
        return self.predicted / self.counted - 1 if self.predicted and self.counted else None


def layout(framework: str, ranks: int) -> tuple[str, ...]:
    """At most four stages; with two a rank, at most two ranks in a pipeline: the models have five or six blocks."""
    if framework == "spatial":  # two rows of the smallest image
        return ("framework.sp=2", f"framework.dp={ranks // 2}")
    if framework in SHARED and ranks == 8:
        return ("framework.tp=4", "framework.dp=2")
    if framework == "hybrid":
        return ("framework.pp=2", f"framework.tp={min(2, ranks // 2)}", f"framework.dp={max(1, ranks // 4)}")
    if framework in TWO_STAGES_A_RANK:
        return (f"framework.dp={ranks // 2}",)
    if framework in PIPELINES and ranks == 8:
        return ("framework.dp=2",)
    return ()


def grid(frameworks: Sequence[str] = FRAMEWORKS, ranks: Sequence[int] = RANKS) -> Iterator[Case]:
    for framework in frameworks:
        for model in MODELS:
            for count in ranks:
                for variant in variants(framework, count):
                    yield Case(framework, model, count, variant)


def variants(framework: str, ranks: int) -> Iterator[str]:
    yield from VARIANTS
    if framework in ZERO:
        yield from ("buckets", "cast")
    if framework == "fsdp" and ranks > 2:
        yield "replicated"
    if framework in ("gpipe", "1f1b") and ranks > 2:
        yield "sharded"


def predicted(config: Config, ranks: int) -> Prediction:
    return by_one_step(config, ranks, MACHINE, OneStep(1.0))


def rehearsed(config: Config, rank: int, ranks: int) -> dict[str, int]:
    rehearsal = rehearse(config, Launch("torchrun", rank, ranks, rank, ranks), torch.device("cpu"))
    assert rehearsal.error is None, rehearsal.error
    return {name: bytes_ or 0 for name, bytes_ in (rehearsal.memory or {}).items()}


def unlike(row: Prediction) -> Sequence[int]:
    """Ranks that may have different bytes: all of them if a boundary between shards cuts tensors."""
    return range(row.gpus) if row.framework in ("zero1", "zero2") else distinct_ranks(row.gpus, row.layout)


def rehearsed_ranks(config: Config, row: Prediction) -> list[dict[str, int]]:
    """Bytes of all ranks that differ from each other, the rank with the highest peak first."""
    memories = [rehearsed(config, rank, row.gpus) for rank in unlike(row)]
    return sorted(memories, key=lambda memory: memory["peak"], reverse=True)


def compared(case: Case, before: Row | None = None) -> Row:
    """before: a row that has what was counted, so that nothing is rehearsed again"""
    if case.framework == "horovod" and (why := why_no_horovod()):
        return Row(case, reason=why)
    config = configuration(*case.words)
    try:
        row = predicted(config, case.ranks)
    except RunError as error:
        return Row(case, reason=str(error))
    if row.status != "ok":
        return Row(case, reason=row.reason)
    counted = before.counted if before else rehearsed_ranks(config, row)[0]["peak"]
    return Row(case, row.memory_bytes, counted)


def kept(file: Path) -> dict[Case, Row]:
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    result = [Row(Case(**row.pop("case")), **row) for row in rows]
    return {row.case: row for row in result}


def table(rows: Sequence[Row]) -> str:
    """MB of 10^6 bytes, predicted / counted and the error; a line for each framework, variant and number of ranks."""
    by_case = {row.case: row for row in rows}
    lines = ["| framework | ranks | variant | " + " | ".join(MODELS) + " |", "|---" * (3 + len(MODELS)) + "|"]
    for case in dict.fromkeys(replace(row.case, model="") for row in rows):
        cells = [cell(by_case.get(replace(case, model=model))) for model in MODELS]
        if any(cells):
            lines.append(f"| {case.framework} | {case.ranks} | {case.variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: Row | None) -> str:
    if row is None or row.error is None or row.predicted is None or row.counted is None:
        return ""
    return f"{row.predicted / 1e6:.3f} / {row.counted / 1e6:.3f} ({row.error:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", default=FRAMEWORKS)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--keep", type=Path, required=True)
    asked = parser.parse_args()
    done, rows = kept(asked.keep), list[Row]()
    for case in grid(asked.frameworks, asked.ranks):
        if case.model not in asked.models:
            continue
        row = compared(case, done.get(case))
        if case not in done:
            with asked.keep.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        rows.append(row)
        print(*asdict(case).values(), cell(row) or row.reason, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
