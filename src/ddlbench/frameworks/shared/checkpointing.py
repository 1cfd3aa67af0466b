"""Activation checkpointing of blocks, of segments of blocks, and of cheap operators, exact for BatchNorm too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from ddlbench.frameworks.shared.groups import batch_norms
from ddlbench.frameworks.shared.offloading import offload_blocks
from ddlbench.job import Job, on_meta
from ddlbench.measure.formulas.flops import is_costly
from ddlbench.offloading import offloaded, plan_of
from ddlbench.recomputation import SELECTIVE, Link, Names, Plan, flat, named

RandomStates: TypeAlias = tuple[Tensor, tuple[list[int], list[Tensor]]]  # of the CPU and of GPUs, by their numbers


def blocks_plan(
    job: Job, samples: float, first: int = 0, end: int | None = None, in_flight: int = 1
) -> tuple[list[str], Plan]:
    """The names and the plan of the blocks from `first` to `end` that one rank has (None: all).

    samples: those of a micro batch; in_flight: micro batches in memory at once. Raises Unsupported if no plan is
    possible.
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
    """Make the segments and offload the blocks that the job asks for, on a rank that has all blocks."""
    if not (job.checkpoint_activations or job.offload_activations):
        return
    names, plan = replica_plan(job, data_size)
    checkpoint_blocks(model, named(plan, names))
    if job.checkpoint_activations == SELECTIVE:
        keep_costly_outputs(model)
    if job.offload_activations:  # after the segments, in which no block is offloaded
        offload_blocks(model, [names[index] for index in offloaded(plan)], job.device)


def checkpoint_blocks(model: nn.Sequential, segments: Names) -> None:
    """Every segment keeps its input only and runs again in the backward pass (Chen et al. 2016)."""
    vars(model)["segments"] = segments
    forward = _forward(model, segments)
    if any(isinstance(item, list) and len(item) > 1 for item in segments):
        model.forward = cast(Callable[..., Tensor], forward)


def keep_costly_outputs(model: nn.Sequential) -> None:
    """Every block keeps its input and the outputs of its costly operators only; the other operators run again in the
    backward pass."""
    vars(model)["selective"] = selective_names(model)
    for block in model.children():
        keep_costly_outputs_of(block)


def selective_names(model: nn.Sequential) -> list[str]:
    """The blocks that `keep_costly_outputs` changes."""
    return [name for name, block in model.named_children() if next(block.children(), None)]


def keep_costly_outputs_of(block: nn.Module) -> None:
    """A block of a single layer stays as it is: it has nothing between its input and its output."""
    if not next(block.children(), None):
        return
    for before, module in pairwise(block.modules()):
        if getattr(module, "inplace", False) and not batch_norms(before):
            cast(Any, module).inplace = False  # VGG's ReLU would overwrite an output that is kept
    block.forward = cast(Callable[..., Tensor], _checkpointed(block.forward, [block], selective=True))


def segment_facts(segments: Names) -> dict[str, Any]:
    """For the record: nothing where no block runs again."""
    return {"segments": segments} if any(isinstance(item, list) for item in segments) else {}


def facts_of_model(model: nn.Module) -> dict[str, Any]:
    """What `checkpoint_blocks`, `keep_costly_outputs` and `offload_blocks` have done to it."""
    done = {key: vars(model)[key] for key in ("selective", "offloaded") if vars(model).get(key)}
    return segment_facts(vars(model).get("segments", [])) | done


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


def _checkpointed(
    forward: Callable[[Tensor], Tensor], blocks: Sequence[nn.Module], selective: bool = False
) -> Callable[[Tensor], Tensor]:
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the first and the second run."""
        if not selective:
            return nullcontext(), _frozen_statistics(blocks)
        keep, drop, states = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, deque[RandomStates]()
        first, second = create_selective_checkpoint_contexts(
            lambda _, func, *__, **___: keep if is_costly(func) else drop
        )
        return _all(first, _Random(states, False)), _all(_frozen_statistics(blocks), second, _Random(states, True))

    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


class _Random(TorchDispatchMode):
    """The random generators are in the same state after a costly operator of both runs: the second run does not compute
    attention with dropout, and what follows must draw the same numbers. states: those after each such operator"""

    def __init__(self, states: deque[RandomStates], again: bool) -> None:
        super().__init__()
        self.states, self.again = states, again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_costly(func) and torch.Tag.nondeterministic_seeded in func.tags:
            if self.again:
                of_cpu, of_gpus = self.states.popleft()
                torch.set_rng_state(of_cpu)
                set_device_states(*of_gpus)
            else:
                of_gpus = get_device_states(*args) if torch.cuda.is_initialized() else ([], [])
                self.states.append((torch.get_rng_state(), of_gpus))
        return out


@contextmanager
def _all(*contexts: AbstractContextManager[Any]) -> Generator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


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
