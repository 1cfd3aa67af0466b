"""`--plan`: which framework, layout, micro batch and recomputation to train with, by the predicted step and memory.

Every framework whose updates are those of one device is tried, in every layout: tensor parallelism within a node, any
number of stages, replicas on the other GPUs (those of pipelines with and without framework.sharded); with micro batches
of 1, 2, 4, ... samples, and with and without train.checkpoint_activations. What does not fit the memory, or what a
framework's own check refuses, is no plan.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ddlbench.config.choices import choices
from ddlbench.config.schema import Config
from ddlbench.oracle.predictor import Prediction
from ddlbench.predict import ranking
from ddlbench.texts import GIB

# Their updates are late or averaged, so that a faster step may train worse; `deepspeed` is zero0 to zero3,
# and `megatron` has the equations of `tensor`.
NO_PLANS = ("local_sgd", "parameter_server", "pipedream", "pipedream_2bw", "deepspeed", "megatron")
DEGREES = ("dp", "tp", "pp", "sp")
SHARES = ("tensor", "megatron", "channel", "spatial", "hybrid")  # whose ranks share layers or images
SHOWN = 10  # of the best


def frameworks() -> list[str]:
    return [name for name in choices("framework") if name not in NO_PLANS]


def plans(config: Config, words: Sequence[str], gpus: int, per_node: int) -> Iterator[Config]:
    """Every configuration of a framework that is tried; replicas of a pipeline with and without shards. words: keys
    that are given are kept"""
    given = {word.lstrip("+").partition("=")[0] for word in words}
    for layout in layouts(config.framework, gpus, per_node):
        replicas = gpus // prod(getattr(layout, name, None) or 1 for name in DEGREES[1:])
        frameworks = [layout]
        if hasattr(layout, "sharded") and replicas > 1 and "framework.sharded" not in given:
            frameworks = [replace(layout, sharded=sharded) for sharded in (False, True)]
        samples = config.train.samples_per_update(gpus) // replicas
        micro_batches = [2**n for n in range(samples.bit_length()) if samples % 2**n == 0]
        if "train.micro_batch" in given or not micro_batches:  # more replicas than samples: refused with the reason
            micro_batches = [config.train.micro_batch]
        recompute = [config.train.checkpoint_activations] if "train.checkpoint_activations" in given else [False, True]
        for framework, size, again in itertools.product(frameworks, micro_batches, recompute):
            train = replace(config.train, micro_batch=size, checkpoint_activations=again)
            yield replace(config, train=train, framework=framework)


def layouts(framework: Any, gpus: int, per_node: int, most_stages: int | None = None) -> Iterator[Any]:
    """The layouts of a framework on so many GPUs. Images are shared within a node, as layers are. Where a framework
    shares layers and has stages, both are more than one, because `tensor` and the pipelines are tried alone.
    most_stages: None for as many as there are GPUs"""
    degrees = [degree for degree in DEGREES if hasattr(framework, degree)]
    if not degrees:
        yield framework
        return
    within = [n for n in range(2, per_node + 1) if per_node % n == 0]
    tensors = within if framework.name in SHARES else [1]
    stages = [n for n in range(2, (most_stages or gpus) + 1) if gpus % n == 0] if "pp" in degrees else [1]
    for tp in tensors:
        for pp in stages:
            if gpus % (tp * pp) == 0:
                chosen = {"dp": gpus // (tp * pp), "tp": tp, "sp": tp, "pp": pp}
                yield replace(framework, **{degree: chosen[degree] for degree in degrees})


def settings(config: Config) -> dict[str, Any]:
    """What a plan sets beside the framework, as keys of ddlbench."""
    framework: Any = config.framework
    names = (*DEGREES, "sharded")
    layout = {f"framework.{name}": getattr(framework, name) for name in names if hasattr(framework, name)}
    keys = ("global_batch", "batch_per_gpu", "micro_batch", "checkpoint_activations")
    train = {f"train.{key}": value for key in keys if (value := getattr(config.train, key)) is not None}
    return layout | train


def show(rows: Sequence[Prediction], heading: str, max_memory: float | None) -> None:
    """Print the plans, or why there is none.

    rows: all that were tried, on one number of GPUs; max_memory: bytes, None: those of the device
    """
    best = ranking.fitting(rows, max_memory=max_memory)
    samples = rows[0].settings.get("train.global_batch")
    batch = f", {samples} samples an update" if samples else ""
    tried = f"{len(rows):,} plans of {len({row.framework for row in rows})} frameworks at {rows[0].gpus} GPUs{batch}"
    if not best:
        print(f"{tried}: none is possible: {_short_of(rows)}\n")
        return
    print(f"{heading}\n{tried}: {len(best):,} fit; the best {min(SHOWN, len(best))}:\n")
    print(ranking.table(best[:SHOWN]))
    others = ranking.contrast(best)
    if others:
        print(f"\nthe best of each other framework:\n\n{ranking.table(others)}")
    print("", *ranking.marks(best[:SHOWN]), *ranking.conclusion(best, ""), sep="\n")
    print(f"to run it: {command(best[0])}\n")


def command(row: Prediction) -> str:
    """The words of ddlbench for a plan."""
    words = [f"{key}={str(value).lower()}" for key, value in row.settings.items()]
    return " ".join([f"+framework={row.framework}", *words])


def _short_of(rows: Sequence[Prediction]) -> str:
    """What every plan lacks: memory, or what the checks say most often."""
    possible = [row for row in rows if row.status == "ok"]
    if possible:
        least = min(possible, key=lambda row: row.memory_bytes or 0.0)
        needed = f"{(least.memory_bytes or 0.0) / GIB:.3g} GiB"
        return f"the plan that needs the least memory is {command(least)}, with {needed}"
    (reason, count), *_ = Counter(row.reason for row in rows).most_common(1)
    return f"{reason} ({count:,} of {len(rows):,})"
