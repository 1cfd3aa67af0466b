"""What tensor parallelism cannot split, said before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.layout import divisors
from ddlbench.frameworks.shared.meta import on_meta
from ddlbench.frameworks.shared.refusals import check_elementwise
from ddlbench.frameworks.tensor.layers import is_transposed
from ddlbench.job import Job


def check_parts(name: str, job: Job, tp: int, pp: int = 1) -> None:
    """Raise Unsupported for what `tp` ranks cannot share, beside pipelines of `pp` stages."""
    check_divides(name, job, tp, pp)
    check_elementwise(name, job)


def check_compile(name: str, job: Job) -> None:
    if job.compile:
        raise Unsupported(
            f"{name}: torch.compile breaks the graph at the collectives of every layer: set train.compile=false"
        )


def check_divides(name: str, job: Job, tp: int, pp: int) -> None:
    """Heads, features and channels must be shared evenly."""
    numbers = split_numbers(on_meta(job), job.model.tensor_plan())
    uneven = next((what for what, number in numbers.items() if number % tp), None)
    if uneven is not None:
        replica = divisors(job.world_size // pp)
        fits = max(n for n in replica if n < tp and not any(count % n for count in numbers.values()))
        raise Unsupported(
            f"{name}: {tp} ranks cannot share the {numbers[uneven]} {uneven}: "
            f"choose framework.tp={fits} framework.dp={job.world_size // (fits * pp)}"
        )
    if job.model.outputs() < tp:
        raise Unsupported(f"{name}: {tp} ranks cannot share the {job.model.outputs()} classes: give each at least one")


def split_numbers(model: nn.Sequential, plan: Mapping[str, str]) -> dict[str, int]:
    """What must divide over the ranks, and how many of it there are."""
    numbers: dict[str, int] = {}
    for name, style in plan.items():
        module = cast(Any, model.get_submodule(name))
        match style:
            case "heads":
                numbers[f"heads of {name}"] = module.num_heads
            case "column":
                numbers[f"features of {name}"] = module.nf if is_transposed(module) else module.out_features
            case "filter":
                numbers[f"filters of {name}"] = module.out_channels
            case _:
                pass
    return numbers


def check_sequence(job: Job, tp: int) -> None:
    length, *more = job.model.input_shape()
    if more:
        raise Unsupported(f"tensor: {job.model.name} has no sequence to split: set framework.sequence_parallel=false")
    if length % tp:
        raise Unsupported(
            f"tensor: {tp} ranks cannot share the {length} tokens of a sequence: choose "
            f"model.seq_len={length - length % tp or tp} or framework.sequence_parallel=false"
        )
