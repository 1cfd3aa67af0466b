"""A framework of any kind that fails on one rank, and data that one rank cannot read. planted.py puts them into the
program."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.data.feed import Fetched
from ddlbench.data.samples import SampleImages, SampleText
from ddlbench.data.text.dataset import TokenSplit
from ddlbench.errors import Unavailable, UserError
from ddlbench.job import Batch, Job, Model, Score, Trainer
from ddlbench.run.peers import FAILURE
from tests.support.busy import compute

OnBatch = Callable[[Batch | None], Tensor | None]


@dataclass
class Failing:
    """Mixed into a framework.

    how: raise | memory | allocate | nan | exit | kill | stop | hang | freeze | worker | launcher | abort, at the third
        step; slow, at every step; busy, work that `on` alone has at every step; host, time in which every rank starts
        no operator at every step; loss, at the third micro batch, on the rank that computes it; setup | hang_in_setup,
        before the first step; kill_in_start, while the other ranks start Horovod; validation, after the last step;
        unavailable, before the ranks connect; none
    on: the rank that fails, counted from the end where negative
    after_s: of abort: seconds from the failure of `on` to the abort of the other ranks; of busy and host: of a step
    close_hangs, disconnect_hangs: on `on`, after the end of the run, where the trainer is closed or the group is
        destroyed
    """

    how: str = "raise"
    on: int = -1
    after_s: float = 0.0
    close_hangs: bool = False
    disconnect_hangs: bool = False
    steps: int = 0
    losses: int = 0

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
        if fails and self.how == "kill_in_start":
            import_module("horovod.torch").init = partial(fail, "kill", None)
        if self.how == "loss":
            job = replace(job, loss=partial(self._loss, job.loss))
        trainer: Trainer = super().setup(job)  # pyright: ignore
        trainer.step = partial(self._step, trainer.step, fails)
        trainer.evaluate = partial(self._evaluate, trainer.evaluate)
        if fails and self.close_hangs:
            trainer.close = lambda: time.sleep(600)
        if fails and self.disconnect_hangs:
            dist.destroy_process_group = lambda: time.sleep(600)
        return trainer

    def _step(self, step: OnBatch, fails: bool, batch: Batch | None) -> Tensor | None:
        self.steps += 1
        if self.steps == 3 and fails:
            fail(self.how, batch)
        elif self.steps == 3 and self.how == "abort":
            be_aborted(self.after_s)
        if self.how == "slow":
            time.sleep(0.5)
        if self.how == "host" or (self.how == "busy" and fails):
            compute(self.after_s)
        return step(batch)

    def _loss(self, loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, targets: Tensor) -> Tensor:
        self.losses += 1
        if self.losses == 3:
            raise RuntimeError("planted fault")
        return loss(output, targets)

    def _evaluate(self, evaluate: Callable[[Batch | None, Score], None], batch: Batch | None, score: Score) -> None:
        broken = self.how == "validation"
        evaluate(batch, lambda output, samples: score(output.fill_(float("nan")) if broken else output, samples))


def failing(framework: type) -> type:
    """The class of a framework, with the faults of `Failing`."""
    return dataclass(type("Broken", (Failing, framework), {}))


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
    failure = f"0/{FAILURE}"  # of ranks that no launcher has started again (ranks/launch.py)

    def abort() -> None:
        store.wait([failure])
        time.sleep(after_s)
        os.abort()

    threading.Thread(target=abort, daemon=True).start()
    time.sleep(600)


@dataclass
class Stopping(SampleImages):
    """The rank that prepares the data is stopped (SIGSTOP) while it does so."""

    def prepare(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class SlowDisk(SampleText):
    """Each sample takes `SECONDS` to read."""

    SECONDS: ClassVar[float] = 0.05

    def split(self, train: bool, model: Model, seed: int) -> TokenSplit:
        split = super().split(train, model, seed)
        return SlowSplit(split.file, split.seq_len, split.windows)


class SlowSplit(TokenSplit):
    def __getitems__(self, keys: list[tuple[int, int]]) -> Fetched:
        time.sleep(SlowDisk.SECONDS * len(keys))
        return super().__getitems__(keys)


@dataclass
class OnOneNode(SampleImages):
    """Data that the node of rank 1 does not have."""

    def check(self, model: Model, validate: bool = True) -> None:
        if os.environ["RANK"] == "1":
            raise UserError("data.root=/planted is no folder here: give the folder of the data")
        super().check(model, validate)
