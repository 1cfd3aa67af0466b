"""Seconds of a step of a framework, measured by processes that have met already. Every rank calls these functions."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddlbench.config.compose import make_job
from ddlbench.config.schema import Config
from ddlbench.data.feed import Request
from ddlbench.data.loaders.synthetic import random_batch
from ddlbench.job import Batch, Framework, Job, Trainer
from ddlbench.oracle.measured import inputs, network
from ddlbench.ranks.launchers import Launch, detect
from ddlbench.run.attempt import seed_replica

CPU = torch.device("cpu")
WARM = 3  # steps: DDP makes its final buckets after the first, FSDP its groups in it
WINDOWS = 3


def step_seconds(config: Config, window_s: float) -> list[float]:
    """Seconds of a step in each of WINDOWS windows of about `window_s`, of the slowest rank from a barrier on. The
    framework is set up and closed."""
    framework: Any = config.framework
    return _measured(framework, make_job(config, detect(), CPU), window_s)


def seconds_beside_others(config: Config, window_s: float) -> list[float]:
    """Seconds of steps of jobs of one process, one on every rank at once: they share cores, caches and memory, and send
    nothing. config: of framework `single`."""
    return _measured(config.framework, make_job(config, Launch("alone"), CPU), window_s)


def blocks(config: Config, samples: int) -> tuple[list[tuple[float, float]], float]:
    """Seconds of each block's forward and backward pass of a micro batch, and of the update (measured/inputs.py)."""
    return inputs.measure(config, CPU, samples)


def collectives(sizes: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of each collective by size, and what one costs that is hidden behind computing (measured/network.py)."""
    return {**network.sweep(CPU, sizes), "hidden_cost": [network.hidden_cost(CPU)]}


def _measured(framework: Framework, job: Job, window_s: float) -> list[float]:
    torch.manual_seed(job.seed)
    framework.check(job)
    trainer = framework.setup(job)
    seed_replica(job, trainer.place)
    batch = batch_of(job, trainer)
    _seconds(trainer, batch, WARM - 1)
    steps = max(1, round(window_s / _slowest(_seconds(trainer, batch, 1))))
    step_s = [_slowest(_seconds(trainer, batch, steps)) / steps for _ in range(WINDOWS)]
    trainer.flush()
    dist.barrier()
    trainer.close()
    del trainer
    gc.collect()  # wrapped models hide in reference cycles
    return step_s


def _seconds(trainer: Trainer, batch: Batch | None, steps: int) -> float:
    """Seconds of so many steps, from one barrier to the end of this rank's last step."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step(batch)
    return time.perf_counter() - began


def _slowest(seconds: float) -> float:
    """The largest number over the ranks, on every rank."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def batch_of(job: Job, trainer: Trainer) -> Batch | None:
    """One batch for all steps, without input cost; its numbers do not change what a step computes."""
    if not trainer.place.reads_data:
        return None
    samples = job.replica_batch(trainer.place.data_size)
    return random_batch(Request(job.model, trainer.place, CPU, job.seed, samples), samples)
