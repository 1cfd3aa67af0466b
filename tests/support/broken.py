"""Frameworks with planted faults: they fail on their last rank, or train something else without saying so."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.data.images.sample import SampleImages
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.shared.common import accumulate
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Batch, Job, Place
from ddlbench.run.board import FAILURE


@dataclass
class Failing:
    """Mixed into a framework.

    how: raise | memory | nan | exit | kill | stop | hang | worker | launcher | abort, at the third step; slow, at every
        step; setup | hang_in_setup, before the first; validation, after the last
    on: the rank that fails, counted from the end where negative
    after_s: abort only: seconds from the failure of `on` to the abort of the other ranks
    """

    how: str = "raise"
    on: int = -1
    after_s: float = 0.0
    steps: int = 0

    def setup(self, job: Job) -> Place:
        if job.rank == self.on % job.world_size:
            if self.how == "setup":
                raise torch.OutOfMemoryError("planted: too large")
            if self.how == "hang_in_setup":
                time.sleep(600)
        return super().setup(job)  # pyright: ignore

    def step(self, batch: Batch | None) -> Tensor | None:
        self.steps += 1
        if self.steps == 3 and self.job.rank == self.on % self.job.world_size:
            fail(self.how, batch)
        elif self.steps == 3 and self.how == "abort":
            be_aborted(self.after_s)
        if self.how == "slow":
            time.sleep(0.5)
        return super().step(batch)  # pyright: ignore

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        output = super().evaluate(batch)  # pyright: ignore
        return output.fill_(float("nan")) if self.how == "validation" and output is not None else output


def fail(how: str, batch: Batch | None) -> None:
    match how:
        case "raise":
            raise RuntimeError("planted fault")
        case "memory" | "abort":
            raise torch.OutOfMemoryError("planted: out of memory")
        case "nan":
            assert batch is not None
            batch.inputs.fill_(float("nan"))
        case "exit":
            os._exit(9)
        case "kill":  # as the kernel does where memory runs out
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(600)
        case "worker":
            for worker in multiprocessing.active_children():
                worker.kill()
            time.sleep(600)  # DataLoader's handler of SIGCHLD interrupts it
        case "launcher":
            os.kill(os.getppid(), signal.SIGKILL)


def be_aborted(after_s: float) -> None:
    """As by NCCL's watchdog: the main thread is stuck on the device, and the process aborts some time after a peer's
    failure."""
    store = dist.distributed_c10d._get_default_store().clone()

    def abort() -> None:
        store.wait([FAILURE])
        time.sleep(after_s)
        os.abort()

    threading.Thread(target=abort, daemon=True).start()
    time.sleep(600)


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


@dataclass
class Stopping(SampleImages):
    """The rank that prepares the data is stopped at it."""

    def prepare(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
