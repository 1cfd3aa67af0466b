"""One rank of the real job, for any number of ranks, on one machine without devices.

The framework sets up and trains some steps under a fake process group and fake tensors (ranks/fake.py): nothing is sent
or computed, everything has its shape. The last step is reported: earlier ones make what lasts, and fill a pipeline.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddlbench.config.schema import Config
from ddlbench.errors import RunError
from ddlbench.job import Batch, Job, Place, Trainer
from ddlbench.ranks.fake import fake_world
from ddlbench.ranks.launch import Launch
from ddlbench.run.assembly import make_job
from ddlbench.run.rehearsal.observed import Observed, short
from ddlbench.run.rehearsal.storages import before_update, gradients, memory, stored

WARM_UP = 2  # steps before the reported one


@dataclass(frozen=True)
class Sent:
    """The collectives of a step of one kind in one group: `ranks` ranks, each `stride` after the one before. bytes_: of
    whole messages, what all ranks of the group end with or start from."""

    kind: str
    ranks: int
    stride: int
    count: float
    bytes_: float


@dataclass(frozen=True)
class Rehearsal:
    """One rank. None: not rehearsed, for the reason in `left_out`.

    memory: bytes of parameters, gradients and optimizer, storages, each once; and the most that live at once in a step
    host_waits: calls of a step in which the host waits for its device, by call and line
    error: what does not fit together, and where
    """

    framework: str
    model: str
    gpus: int
    device: str
    rank: int
    coordinates: dict[str, int] = field(default_factory=dict[str, int])
    replicas: int = 1
    memory: dict[str, int | None] | None = None
    collectives: tuple[Sent, ...] | None = None
    host_waits: dict[str, float] | None = None
    flops: float | None = None
    left_out: str | None = None
    error: str | None = None


def rehearse(config: Config, launch: Launch, device: torch.device) -> Rehearsal:
    """UserError, Unsupported or Unavailable where the framework refuses the job."""
    return rehearse_job(config.framework, make_job(config, launch, device))


def rehearse_job(framework: Any, job: Job) -> Rehearsal:
    device = job.device
    row = Rehearsal(framework.name, job.model.name, job.world_size, device.type, job.rank)
    with warnings.catch_warnings(), fake_world(job.rank, job.world_size, device, framework):
        warnings.simplefilter("ignore")  # fake tensors warn of what they cannot know
        framework.check(job)
        observed = Observed(device)
        try:
            with observed.observing():
                trainer = framework.setup(job)
                place = trainer.place
                row = replace(row, coordinates=dict(place.coordinates), replicas=place.data_size)
                reason = no_backward(device)
                if reason is None:
                    row = stepped(row, trainer, job, observed, period=getattr(framework, "local_steps", 1))
                else:
                    row = replace(row, memory=memory(trainer), left_out=reason)
                trainer.close()
                return row
        except RunError:
            raise
        except Exception as error:  # whatever a library raises is what does not fit together
            return replace(row, error=" ".join(f"{type(error).__name__}: {error}".split())[:500] + line(error))


def no_backward(device: torch.device) -> str | None:
    """Why no backward pass can be made on fake tensors of the device, None where it can: torch's autograd engine asks
    the driver for the device's streams."""
    weight = torch.zeros(1, device=device, requires_grad=True)
    try:
        (2 * weight).sum().backward()
    except RuntimeError as error:
        return f"torch's autograd asks the driver of {device.type}: no step; try rehearsal.device=cpu ({error})"
    return None


def stepped(row: Rehearsal, trainer: Trainer, job: Job, observed: Observed, period: int) -> Rehearsal:
    """With what a step sends and waits for. period: steps after which they repeat; the numbers are averages over it."""
    batch = fake_batch(job, trainer.place) if trainer.place.reads_data else None
    held = [0]
    before_update(trainer, lambda: held.append(stored(gradients(trainer), set())))
    for _ in range(WARM_UP):
        trainer.step(batch)
    observed.clear()
    for _ in range(period):
        trainer.step(batch)
    sent = tuple(
        Sent(*group, count=count / period, bytes_=observed.sent[group] / period)
        for group, count in observed.counts.items()
    )
    waits = {f"{call} at {place}": count / period for (call, place), count in observed.waits.items()}
    bytes_ = memory(trainer) | {"gradients": max(held) or None, "peak": observed.alive.peak}
    return replace(row, memory=bytes_, collectives=sent, host_waits=waits, flops=observed.flops / period)


def fake_batch(job: Job, place: Place) -> Batch:
    """On the device, where the feed has put it before the step."""
    samples, shape = job.replica_batch(place.data_size), job.model.input_shape()
    targets = torch.zeros(samples, *(shape if job.model.kind == "text" else ()), dtype=torch.int64, device=job.device)
    inputs = targets if job.model.kind == "text" else torch.zeros(samples, *shape, device=job.device)
    valid = torch.ones(samples, dtype=torch.bool, device=job.device)
    return Batch(inputs, targets, valid).to(job.device, job.channels_last)


def line(error: Exception) -> str:
    """The last line of ddlbench that was on the way to an error."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/ddlbench/" in file and "/run/rehearsal/" not in file:
            found = f" at {short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
