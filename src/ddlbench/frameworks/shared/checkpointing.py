"""Activation checkpointing of blocks and of segments of blocks, exact for BatchNorm too."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddlbench.frameworks.shared.batchnorm import batch_norms
from ddlbench.frameworks.shared.meta import on_meta
from ddlbench.frameworks.shared.offloading import offload_blocks
from ddlbench.job import Job
from ddlbench.offloading import offloaded, plan_of
from ddlbench.recomputation import Link, Names, Plan, flat, named


def blocks_plan(
    job: Job, samples: float, first: int = 0, end: int | None = None, in_flight: int = 1
) -> tuple[list[str], Plan]:
    """The names and the plan of the blocks from `first` to `end` that one rank has (None: all).

    samples: of a micro batch; in_flight: of them, in memory at once. Unsupported for a plan that is not possible.
    """
    names = [name for name, _ in on_meta(job).named_children()][first:end]

    def links() -> Sequence[Link]:
        assert job.links is not None, "a budget needs the counts of the blocks"
        return job.links(job, samples)[first:end]

    choices = job.checkpoint_activations, job.offload_activations, job.flops_per_host_byte
    return names, plan_of(*choices, names, links, in_flight)


def replica_plan(job: Job, data_size: int) -> tuple[list[str], Plan]:
    """The names of the blocks and their plan, on a rank that has all of them."""
    return blocks_plan(job, job.replica_batch(data_size) / job.micro_batches(data_size))


def apply_plan(model: nn.Sequential, job: Job, data_size: int) -> None:
    """The segments and the offloaded blocks that the job asks for, on a rank that has all blocks."""
    if not (job.checkpoint_activations or job.offload_activations):
        return
    names, plan = replica_plan(job, data_size)
    checkpoint_blocks(model, named(plan, names))
    if job.offload_activations:  # after the segments, in which no block is offloaded
        offload_blocks(model, [names[index] for index in offloaded(plan)], job.device)


def checkpoint_blocks(model: nn.Sequential, segments: Names) -> None:
    """Every segment keeps its input only and runs again in the backward pass (Chen et al. 2016)."""
    vars(model)["segments"] = segments
    forward = _forward(model, segments)
    if any(isinstance(item, list) and len(item) > 1 for item in segments):
        model.forward = cast(Callable[..., Tensor], forward)


def segment_facts(segments: Names) -> dict[str, Any]:
    """For the record: nothing where no block runs again."""
    return {"segments": segments} if any(isinstance(item, list) for item in segments) else {}


def facts_of_model(model: nn.Module) -> dict[str, Any]:
    """What `checkpoint_blocks` and `offload_blocks` have done to it."""
    names = vars(model).get("offloaded")
    return segment_facts(vars(model).get("segments", [])) | ({"offloaded": names} if names else {})


def _forward(model: nn.Sequential, segments: Names) -> Callable[[Tensor], Tensor]:
    steps = list[Callable[[Tensor], Tensor]]()
    for item in segments:
        blocks = [model.get_submodule(name) for name in flat([item])]
        if isinstance(item, str):
            steps += blocks
        elif len(item) > 1:
            steps.append(_checkpointed(_forward(model, item), blocks))
        else:  # inside of the block, so that hooks around it (FSDP's) gather its weights and cast its input once
            blocks[0].forward = cast(Callable[..., Tensor], _checkpointed(blocks[0].forward, blocks))
            steps += blocks
    return lambda value: reduce(lambda passed, step: step(passed), steps, value)


def _checkpointed(forward: Callable[[Tensor], Tensor], blocks: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of the first and the second run."""
        return nullcontext(), _frozen_statistics(blocks)

    def run(value: Tensor) -> Tensor:
        return checkpoint(forward, value, use_reentrant=False, context_fn=contexts)

    return run


@contextmanager
def _frozen_statistics(blocks: Sequence[nn.Module]) -> Generator[None]:
    """The second forward of checkpointed blocks must not move BatchNorm's running statistics a second time. With
    momentum 0 they stay, and autograd sees the same operations as in the first forward, which it insists on."""
    norms = [norm for block in blocks for norm in batch_norms(block) if norm.num_batches_tracked is not None]
    before = [(norm, norm.momentum, cast(Tensor, norm.num_batches_tracked).clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in before:  # torch may end the second run before it has reached this norm
            norm.momentum = momentum
            cast(Tensor, norm.num_batches_tracked).copy_(count)
