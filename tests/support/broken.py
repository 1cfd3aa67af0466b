"""Frameworks with planted faults: they train something else without saying so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import ZeroTrainer
from ddlbench.frameworks.pipeline.adapter import Pipeline, PipelineTrainer
from ddlbench.frameworks.pipeline.pipedream import PipeDream, PipeDreamTrainer
from ddlbench.frameworks.shared.groups import clip_parts
from ddlbench.frameworks.shared.replica import Replica
from ddlbench.frameworks.tensor.adapter import TensorParallel, TensorReplica
from ddlbench.job import Batch, Job

Repeats = TypeVar("Repeats", Replica, ZeroTrainer)


@dataclass
class Summed(DDP):
    """Gradients summed over ranks where they should be averaged."""

    def setup(self, job: Job) -> Replica:
        trainer = super().setup(job)
        apply = trainer.update.apply

        def summed(parameters: Iterable[nn.Parameter]) -> None:
            parameters = list(parameters)
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad *= job.world_size
            apply(parameters)

        trainer.update.apply = summed
        return trainer


@dataclass
class Dropping(DDP):
    """The last micro batch is a copy of the one before."""

    def setup(self, job: Job) -> Replica:
        return repeating(super().setup(job))


def repeating(trainer: Repeats) -> Repeats:
    """Its last micro batch becomes a copy of the one before."""
    own, count = trainer.step, trainer.micro_batches

    def step(batch: Batch | None) -> Tensor | None:
        assert batch is not None
        size = len(batch.inputs) // count
        inputs, targets = batch.inputs.clone(), batch.targets.clone()
        inputs[-size:], targets[-size:] = inputs[-2 * size : -size], targets[-2 * size : -size]
        return own(replace(batch, inputs=inputs, targets=targets))

    trainer.step = step
    return trainer


@dataclass
class Clipping(DDP):
    """Gradients clipped at a norm of 0.1 without being configured."""

    def setup(self, job: Job) -> Replica:
        return super().setup(replace(job, clip_norm=0.1))


@dataclass
class Untied(Pipeline):
    """The tied embedding's two copies get their own gradients only."""

    def setup(self, job: Job) -> PipelineTrainer:
        trainer = super().setup(job)
        trainer.blocks.shared = []
        return trainer


@dataclass
class CountedTwice(Pipeline):
    """Clipped by a norm in which what all parts of a layer have counts once a part."""

    def setup(self, job: Job) -> PipelineTrainer:
        trainer = super().setup(job)
        counted = list(trainer.model.parameters())
        trainer.update.clip = partial(clip_parts, counted=counted, group=trainer.groups.norm_group)
        return trainer


@dataclass
class OwnTokens(TensorParallel):
    """Sequence parallelism in which each rank trains the parameters that all have on its own tokens only."""

    def setup(self, job: Job) -> TensorReplica:
        trainer = super().setup(job)
        trainer.complete_gradients = lambda: None
        return trainer


@dataclass
class Unstashed(PipeDream):
    """Updates overwrite the weights that backward passes in flight still need."""

    def setup(self, job: Job) -> PipeDreamTrainer:
        trainer = super().setup(job)
        trainer.weights.copy_newest = lambda: None
        return trainer


@dataclass
class Prompt(PipeDream):
    """Updates at the loop's present learning rate instead of their minibatch's."""

    def setup(self, job: Job) -> PipeDreamTrainer:
        trainer = super().setup(job)
        own = trainer.step

        def step(batch: Batch | None) -> Tensor | None:
            rate = trainer.optimizer.param_groups[0]["lr"]
            for minibatch in {id(micro.minibatch): micro.minibatch for micro in trainer.in_flight}.values():
                minibatch.rate = rate
            return own(batch)

        trainer.step = step
        return trainer


@dataclass
class Emptied(PipeDream):
    """Not broken: an epoch ends after three minibatches."""

    steps: int = 0

    def setup(self, job: Job) -> PipeDreamTrainer:
        trainer = super().setup(job)
        own = trainer.step

        def step(batch: Batch | None) -> Tensor | None:
            loss = own(batch)
            self.steps += 1
            if self.steps == 3:
                trainer.flush()
            return loss

        trainer.step = step
        return trainer
