"""Bytes of parameters, gradients and optimizer state on each rank, measured and beside the formula.

torchrun --nproc-per-node=4 -m benchmarks.memory

Every framework makes two updates; the third is measured when its gradients are complete and averaged and nothing is
updated yet, because afterwards the gradients are dropped. A storage counts once and completely, whatever tensors view
it:

parameters  what the model's parameters lie in: slices under FSDP and ZeRO stage 3
gradients   what any tensor has as its `.grad`, and what DeepSpeed keeps for its update
optimizer   what is in the optimizer's state, and tensors of its own that it updates in place of the model's
other       what else there is since before `setup`, in tensors that Python can see: buckets, buffers, activations kept

Two numbers come from elsewhere. `malloc` is by how much the C library's blocks of 16 KiB or more have grown since
before `setup`: all of the above, and what only C++ holds. `most` is the most that the
gradients of the model's own parameters took as they arrived, before a library dropped other ranks' shares. Neither sees
what was allocated and freed in between: gathered weights, activations.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.held import (
    Storages,
    before_update,
    gradients,
    large_blocks,
    live_tensors,
    map_large_blocks,
    model_of,
    optimizer,
    parameters,
    settled_blocks,
    storages,
    total,
    watch_gradients,
)
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Batch, Framework, Job, Place, Trainer, on_meta
from ddlbench.measure.formulas.memory_formula import SPLIT, Bytes, bytes_of_parameter, data_parallel, touched
from ddlbench.models.gpt2 import GPT2
from ddlbench.ranks.control import all_gather
from ddlbench.ranks.launch import connect, disconnect
from ddlbench.ranks.launchers import detect
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from ddlbench.recipe.recipe import CrossEntropy
from ddlbench.texts import markdown_table

MODEL = GPT2("gpt2", n_layer=4, n_embd=256, n_head=4, vocab_size=1024, seq_len=64, dropout=0.0)
OPTIMIZERS = {
    "sgd": OptimizerConfig("sgd", lr=0.01, momentum=0.9),
    "adamw": OptimizerConfig("adamw", lr=0.001),
}
# Buckets of 1 MiB: the usual 25 would hold this model twice. Threshold 0: every parameter in slices, also small ones.
ZERO = {f"zero{stage}": DeepSpeed(zero_stage=stage, reduce_bucket_mb=1, persistence_threshold=0) for stage in (1, 2, 3)}
FRAMEWORKS: dict[str, Any] = {
    "ddp": DDP(),
    **ZERO,
    "fsdp": FSDP(),
    "tensor": TensorParallel(),
    "gpipe": Pipeline(schedule="gpipe"),
    "1f1b": Pipeline(schedule="1f1b"),
}


@dataclass(frozen=True)
class Held:
    """Bytes on one rank; the module's text says of what."""

    parameters: int
    gradients: int
    optimizer: int
    other: int
    malloc: int
    most: int


@dataclass(frozen=True)
class Expected:
    """The formula's bytes. most: None where shares are dropped while gradients arrive, bucket by bucket."""

    held: Bytes
    most: float | None


def measure_all() -> dict[tuple[str, str], tuple[Held, Expected]]:
    """(optimizer, framework) -> what this rank held, and what it should hold."""
    map_large_blocks()
    measure(replace(ZERO["zero1"]), make_job("sgd"), "sgd")  # what is imported and made once must not count
    return {
        (kind, name): measure(replace(framework), make_job(kind), kind)
        for kind in OPTIMIZERS
        for name, framework in FRAMEWORKS.items()
    }


def measure(framework: Framework, job: Job, kind: str) -> tuple[Held, Expected]:
    """One framework on this rank, set up, trained for three updates and closed."""
    framework.check(job)
    batch = samples(job)
    before, allocated = storages(live_tensors()), settled_blocks()
    trainer = framework.setup(job)
    share = part(batch, trainer.place) if trainer.place.reads_data else None
    for _ in range(2):
        trainer.step(share)
    bytes_held: dict[str, int] = {}
    most: list[int] = []
    watch_gradients(model_of(trainer), most)
    before_update(trainer, lambda: bytes_held.update(look(trainer, before, allocated)))
    trainer.step(share)
    formula = expected(framework, trainer, job, kind)
    dist.barrier()
    trainer.close()
    return Held(**bytes_held, most=max(most, default=0)), formula


def look(trainer: Trainer, before: Storages, allocated: int) -> dict[str, int]:
    """Bytes held now. before, allocated: storages and bytes from before `setup`."""
    weights, grads, state = parameters(trainer), gradients(trainer), optimizer(trainer)
    return {
        "malloc": large_blocks() - allocated,
        "parameters": total(weights),
        "gradients": total(grads, weights),
        "optimizer": total(state, weights, grads),
        "other": total(storages(live_tensors()), before, weights, grads, state),
    }


def expected(framework: Any, trainer: Trainer, job: Job, kind: str) -> Expected:
    model, per_parameter, ranks = on_meta(job), bytes_of_parameter(OPTIMIZERS[kind].costs), job.world_size
    sizes = [parameter.numel() for parameter in model.parameters()]
    match framework:
        case DeepSpeed():
            return expected_of_zero(framework.zero_stage, sizes, kind, job)
        case FSDP():
            return Expected(data_parallel(sum(sizes), per_parameter, 3, ranks), None)
        case TensorParallel():
            count = tensor_count(model, job.model.tensor_plan(), ranks)
        case Pipeline():
            count = stage_counts(model, trainer.facts()["blocks_per_stage"])[job.rank]
        case _:  # DDP copies a gradient that has arrived into its bucket: the largest is there twice for a moment
            most = per_parameter.gradients * (sum(sizes) + max(sizes))
            return Expected(data_parallel(sum(sizes), per_parameter, 0, ranks), most)
    return Expected(per_parameter.times(count), per_parameter.gradients * count)


def tensor_count(model: nn.Module, plan: Mapping[str, str], ranks: int) -> float:
    """Parameters of a rank under tensor parallelism: its share of those that the plan splits, and all others."""
    split = {f"{name}.{tensor}" for name, style in plan.items() for tensor in SPLIT.get(style, ())}
    return sum(
        parameter.numel() / (ranks if name in split else 1)
        for name, parameter in model.named_parameters()  # the first of a tied parameter's names: the embedding
    )


def stage_counts(model: nn.Sequential, sizes: Sequence[int]) -> list[int]:
    """Parameters of each pipeline stage of so many blocks: a tied one counts in both of its stages."""
    return [
        sum(parameter.numel() for parameter in model[start:end].parameters())
        for start, end in pairwise([0, *accumulate(sizes)])
    ]


def expected_of_zero(stage: int, sizes: Sequence[int], kind: str, job: Job) -> Expected:
    """DeepSpeed drops other ranks' gradients once they are averaged, at stage 1 too, but at stages 1 and 2 keeps those
    whole that a border between shards cuts."""
    per_parameter = bytes_of_parameter(OPTIMIZERS[kind].costs, own_copy=True)
    held = data_parallel(sum(sizes), per_parameter, stage, job.world_size)
    if stage < 3:
        held = replace(held, gradients=per_parameter.gradients * float(touched(sizes, job.world_size)[job.rank]))
    return Expected(held, per_parameter.gradients * sum(sizes) if stage == 1 else None)


def make_job(kind: str) -> Job:
    return Job(
        model=MODEL,
        loss=CrossEntropy(0.0),
        optimizer=partial(make_optimizer, OPTIMIZERS[kind]),
        device=torch.device("cpu"),
        rank=dist.get_rank(),
        local_rank=dist.get_rank(),  # one host
        world_size=dist.get_world_size(),
        seed=0,
        global_batch=16,
        micro_batch=None,
        timeout_s=120.0,
    )


def samples(job: Job) -> Batch:
    tokens = torch.randint(MODEL.outputs(), (job.global_batch, MODEL.seq_len + 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), dtype=torch.bool))


def part(batch: Batch, place: Place) -> Batch:
    cut = [tensor.chunk(place.data_size)[place.data_rank] for tensor in (batch.inputs, batch.targets, batch.valid)]
    return Batch(*cut)


def table(ranks: Sequence[dict[tuple[str, str], tuple[Held, Expected]]]) -> str:
    """Markdown, in MB, measured / formula; of each framework the rank that holds most."""
    columns = ("optimizer", "framework", "rank", *(field.name for field in fields(Held)))
    rows = list[list[str]]()
    for kind, name in ranks[0]:
        rank = max(range(len(ranks)), key=lambda rank: ranks[rank][kind, name][0].malloc)
        held, formula = ranks[rank][kind, name]
        beside = {**vars(formula.held), "most": formula.most}
        cells = [cell(column, value, beside.get(column)) for column, value in vars(held).items()]
        rows.append([kind, name, str(rank), *cells])
    return markdown_table(columns, rows)


def cell(column: str, measured: int, formula: float | None) -> str:
    if formula is None:
        return "" if column == "most" else f"{measured / 1e6:.2f}"
    return f"{measured / 1e6:.2f} / {formula / 1e6:.2f}"


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    connect(detect(), torch.device("cpu"), 120.0)
    ranks = all_gather(measure_all())
    if dist.get_rank() == 0:
        print(table(ranks), end="")
    disconnect(clean=True)


if __name__ == "__main__":
    main()
