"""Frameworks with planted faults: they fail on their last rank, or train something else without saying so."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddlbench.frameworks.common import accumulate
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipedream import PipeDream
from ddlbench.frameworks.pipeline import Pipeline
from ddlbench.frameworks.tensor import TensorParallel
from ddlbench.job import Batch, Job, Place


@dataclass
class Failing:
    """Mixed into a framework.

    how: raise | exit | hang | memory | nan, at the third step; slow, at every step; setup, before the first
    """

    how: str = "raise"
    steps: int = 0

    def setup(self, job: Job) -> Place:
        if self.how == "setup" and job.rank == job.world_size - 1:
            raise torch.OutOfMemoryError("planted: too large")
        return super().setup(job)  # pyright: ignore

    def step(self, batch: Batch | None) -> Tensor | None:
        self.steps += 1
        if self.steps == 3 and self.job.rank == self.job.world_size - 1:
            match self.how:
                case "raise":
                    raise RuntimeError("planted fault")
                case "exit":
                    os._exit(9)  # as the kernel's out-of-memory killer would end it
                case "hang":
                    time.sleep(600)
                case "memory":
                    raise torch.OutOfMemoryError("planted: out of memory")
                case "nan":
                    assert batch is not None
                    batch.inputs.fill_(float("nan"))
        if self.how == "slow":
            time.sleep(0.5)
        return super().step(batch)  # pyright: ignore


@dataclass
class Broken(Failing, DDP): ...


@dataclass
class BrokenFSDP(Failing, FSDP): ...


@dataclass
class BrokenLocalSGD(Failing, LocalSGD): ...


@dataclass
class BrokenHorovod(Failing, Horovod): ...


@dataclass
class BrokenDeepSpeed(Failing, DeepSpeed): ...


@dataclass
class BrokenTensor(Failing, TensorParallel): ...


@dataclass
class BrokenPipeDream(Failing, PipeDream): ...


@dataclass
class Summed(DDP):
    """Gradients summed over ranks where they should be averaged."""

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        loss = accumulate(self.model, batch, self.job, self.count, self.update, self.model.no_sync)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= self.job.world_size
        self.update.apply(self.model.parameters())
        return loss


@dataclass
class Dropping(DDP):
    """The last micro batch is a copy of the one before."""

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        size = len(batch.inputs) // self.count
        inputs, targets = batch.inputs.clone(), batch.targets.clone()
        inputs[-size:], targets[-size:] = inputs[-2 * size : -size], targets[-2 * size : -size]
        return super().step(replace(batch, inputs=inputs, targets=targets))


@dataclass
class Clipping(DDP):
    """Gradients clipped at a norm of 0.1 though nobody asked."""

    def setup(self, job: Job) -> Place:
        return super().setup(replace(job, clip_norm=0.1))


@dataclass
class BrokenStage(Pipeline):
    """Raises at the last stage's third micro batch, while the other stages wait for it in the schedule."""

    how: str = "raise"
    steps: int = 0

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("planted fault")
        return super()._loss(output, targets)


@dataclass
class BrokenHybrid(Failing, Pipeline):
    """With framework.tp=2 two ranks share every layer of one stage: the other waits for its part of a sum."""


@dataclass
class Untied(Pipeline):
    """The tied embedding's two copies get their own gradients only."""

    def setup(self, job: Job) -> Place:
        place = super().setup(job)
        self.blocks.shared = []
        return place


@dataclass
class CountedTwice(Pipeline):
    """Clipped by a norm in which what all parts of a layer have counts once a part."""

    def setup(self, job: Job) -> Place:
        place = super().setup(job)
        self.blocks._counted = lambda: list(self.model.parameters())
        return place


@dataclass
class OwnTokens(TensorParallel):
    """Sequence parallelism in which each rank trains the parameters that all have on its own tokens only."""

    def _sum_over_tokens(self) -> None: ...


@dataclass
class Unstashed(PipeDream):
    """Updates overwrite the weights that backward passes in flight still need."""

    def setup(self, job: Job) -> Place:
        place = super().setup(job)
        self.flight.weights.part = lambda: None
        return place


@dataclass
class Prompt(PipeDream):
    """Updates at the loop's rate of the moment, not at their minibatch's."""

    def step(self, batch: Batch | None) -> Tensor | None:
        rate = self.optimizer.param_groups[0]["lr"]
        for minibatch in {id(micro.minibatch): micro.minibatch for micro in self.flight.micros}.values():
            minibatch.rate = rate
        return super().step(batch)


@dataclass
class Emptied(PipeDream):
    """Not broken: an epoch ends after three minibatches."""

    steps: int = 0

    def step(self, batch: Batch | None) -> Tensor | None:
        loss = super().step(batch)
        self.steps += 1
        if self.steps == 3:
            self.flush()
        return loss
