"""Planted faults: what a trainer is changed into trains something else without saying so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ddlbench.frameworks.shared.groups import clip_parts
from ddlbench.frameworks.spatial.layers import Halo
from ddlbench.job import Batch, Framework, Job
from tests.support.changed_job import with_setup

Kind = TypeVar("Kind", bound=Framework)


def broken(framework: Kind, fault: Callable[[Any], object]) -> Kind:
    """The framework, whose trainers have the fault."""

    def setup(job: Job) -> Any:
        trainer = framework.setup(job)
        fault(trainer)
        return trainer

    return with_setup(framework, setup)


def summed(trainer: Any) -> None:
    """Gradients summed over ranks where they should be averaged."""
    apply = trainer.update.apply

    def apply_sum(parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= dist.get_world_size()
        apply(parameters)

    trainer.update.apply = apply_sum


def summed_shards(trainer: Any) -> None:
    """The same of FSDP."""
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


def summed_by_horovod(trainer: Any) -> None:
    """The same of Horovod."""
    from horovod.torch import Sum  # pyright: ignore[reportMissingImports]

    trainer.optimizer.op = Sum


def repeating(trainer: Any) -> None:
    """The last micro batch becomes a copy of the one before."""
    own, count = trainer.step, trainer.micro_batches

    def step(batch: Batch) -> Tensor | None:
        size = len(batch.inputs) // count
        inputs, targets = batch.inputs.clone(), batch.targets.clone()
        inputs[-size:], targets[-size:] = inputs[-2 * size : -size], targets[-2 * size : -size]
        return own(replace(batch, inputs=inputs, targets=targets))

    trainer.step = step


def untied(trainer: Any) -> None:
    """The tied embedding's two copies get their own gradients only."""
    trainer.blocks.shared = []


def counted_twice(trainer: Any) -> None:
    """Clipped by a norm in which what all parts of a layer have counts once a part."""
    counted = list(trainer.model.parameters())
    trainer.update.clip = partial(clip_parts, counted=counted, group=trainer.groups.norm_group)


def own_tokens(trainer: Any) -> None:
    """Sequence parallelism in which each rank trains the parameters that all have on its own tokens only."""
    trainer.complete_gradients = lambda: None


def without_halo(trainer: Any) -> None:
    """Gradients of the rows that other ranks lent are not given back."""
    own = trainer.step

    def own_only(halo: Halo, gradient: Tensor, x: Tensor) -> Tensor:
        _, *pieces, _ = gradient.split([halo.above, *halo.taken, halo.below], 2)
        result = torch.zeros_like(x)
        result[:, :, halo.lent[halo.part.rank]] = pieces[halo.part.rank]
        return result

    def step(batch: Batch | None) -> Tensor | None:
        with patch.object(Halo, "give_back", own_only):
            return own(batch)

    trainer.step = step


def unstashed(trainer: Any) -> None:
    """PipeDream's updates overwrite the weights that backward passes in flight still need."""
    trainer.weights.copy_newest = lambda: None


def prompt(trainer: Any) -> None:
    """PipeDream's updates at the loop's present learning rate instead of their minibatch's."""
    own = trainer.step

    def step(batch: Batch | None) -> Tensor | None:
        rate = trainer.optimizer.param_groups[0]["lr"]
        for minibatch in {id(minibatch): minibatch for minibatch, _, _ in trainer.in_flight}.values():
            minibatch.rate = rate
        return own(batch)

    trainer.step = step
