"""Frameworks with planted faults: they fail on their last rank, or train something else without saying so."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.data.images.sample import SampleImages
from ddlbench.errors import Unavailable, UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed, ZeroTrainer
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod, horovod_torch
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream, PipeDreamTrainer
from ddlbench.frameworks.pipeline.trainer import PipelineTrainer
from ddlbench.frameworks.shared.replica import Replica
from ddlbench.frameworks.tensor.adapter import TensorParallel, TensorReplica
from ddlbench.job import Batch, Job, Model, Trainer
from ddlbench.run.peers import FAILURE

OnBatch = Callable[[Batch | None], Tensor | None]
Repeats = TypeVar("Repeats", Replica, ZeroTrainer)


@dataclass
class Failing:
    """Mixed into a framework.

    how: raise | memory | allocate | nan | exit | kill | stop | hang | freeze | worker | launcher | abort, at the third
        step; slow, at every step; setup | hang_in_setup, before the first; validation, after the last; unavailable,
        before the ranks connect; none
    on: the rank that fails, counted from the end where negative
    after_s: abort only: seconds from the failure of `on` to the abort of the other ranks
    close_hangs: on `on`, after the end of the run
    """

    how: str = "raise"
    on: int = -1
    after_s: float = 0.0
    close_hangs: bool = False
    steps: int = 0

    def check(self, job: Job) -> None:
        if self.how == "unavailable" and job.rank == self.on % job.world_size:
            raise Unavailable("planted: no library on this node: install it")
        super().check(job)  # pyright: ignore

    def setup(self, job: Job) -> Any:  # whatever the framework's own returns
        fails = job.rank == self.on % job.world_size
        if fails and self.how == "setup":
            raise torch.OutOfMemoryError("planted: too large")
        if fails and self.how == "hang_in_setup":
            time.sleep(600)
        trainer: Trainer = super().setup(job)  # pyright: ignore
        trainer.step = partial(self._step, trainer.step, fails)
        trainer.evaluate = partial(self._evaluate, trainer.evaluate)
        if fails and self.close_hangs:
            trainer.close = lambda: time.sleep(600)
        return trainer

    def _step(self, step: OnBatch, fails: bool, batch: Batch | None) -> Tensor | None:
        self.steps += 1
        if self.steps == 3 and fails:
            fail(self.how, batch)
        elif self.steps == 3 and self.how == "abort":
            be_aborted(self.after_s)
        if self.how == "slow":
            time.sleep(0.5)
        return step(batch)

    def _evaluate(self, evaluate: OnBatch, batch: Batch | None) -> Tensor | None:
        output = evaluate(batch)
        return output.fill_(float("nan")) if self.how == "validation" and output is not None else output


def fail(how: str, batch: Batch | None) -> None:
    match how:
        case "raise":
            raise RuntimeError("planted fault")
        case "memory" | "abort":
            raise torch.OutOfMemoryError("planted: out of memory")
        case "allocate":  # more than any machine has: the allocator of the CPU refuses it
            torch.empty(2**50)
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
        case "freeze":  # as a kernel launch that holds the GIL and finds the queue of the device full
            ctypes.PyDLL(None).sleep(600)
        case "worker":
            for worker in multiprocessing.active_children():
                worker.kill()
        case "launcher":
            os.kill(os.getppid(), signal.SIGKILL)


def be_aborted(after_s: float) -> None:
    """As by NCCL's watchdog: the main thread is stuck on the device, and the process aborts some time after a peer's
    failure."""
    store = dist.distributed_c10d._get_default_store()._underlying_non_prefix_store.clone()

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
class BrokenHorovod(Failing, Horovod):
    """how: also kill_in_start, while the other rank starts Horovod"""

    def setup(self, job: Job) -> Any:
        if self.how == "kill_in_start" and job.rank == self.on % job.world_size:
            horovod_torch().init = partial(fail, "kill", None)
        return super().setup(job)


@dataclass
class BrokenDeepSpeed(Failing, DeepSpeed): ...


@dataclass
class BrokenTensor(Failing, TensorParallel): ...


@dataclass
class BrokenPipeDream(Failing, PipeDream): ...


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
class BrokenStage(Pipeline):
    """Raises at the last stage's third micro batch, while the other stages wait for it in the schedule."""

    how: str = "raise"
    steps: int = 0

    def setup(self, job: Job) -> PipelineTrainer:
        def loss(output: Tensor, targets: Tensor) -> Tensor:
            self.steps += 1
            if self.steps == 3:
                raise RuntimeError("planted fault")
            return job.loss(output, targets)

        return super().setup(replace(job, loss=loss))


@dataclass
class BrokenHybrid(Failing, Pipeline):
    """With framework.tp=2 two ranks share every layer of one stage: the other waits for its part of a sum."""


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
        trainer.blocks._counted = lambda: list(trainer.model.parameters())
        return trainer


@dataclass
class OwnTokens(TensorParallel):
    """Sequence parallelism in which each rank trains the parameters that all have on its own tokens only."""

    def setup(self, job: Job) -> TensorReplica:
        trainer = super().setup(job)
        trainer._sum_over_tokens = lambda: None
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


@dataclass
class Stopping(SampleImages):
    """The rank that prepares the data is stopped (SIGSTOP) while it does so."""

    def prepare(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class OnOneNode(SampleImages):
    """Data that the node of rank 1 does not have."""

    def check(self, model: Model, validate: bool = True) -> None:
        if os.environ["RANK"] == "1":
            raise UserError("data.root=/planted is no folder here: give the folder of the data")
        super().check(model, validate)
